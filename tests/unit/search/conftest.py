"""A search without a device: a cost function stands for building, timing and racing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searches import pure_placements

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import load_model
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.regions.search import find_regions
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.blocks import CostModel, fuse
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import LayerTime, Placement, Trial

Cost = Callable[[Placement], float | None]
MARGIN = 0.99  # what wins a race is faster by at least this


@pytest.fixture
def space_of(models: Path) -> Callable[..., SchemeSpace]:
    """The space of an example model, of the nodes whose operators are named, or of all."""

    def make(name: str = "digits_resnet", *ops: str) -> SchemeSpace:
        model = fold_batchnorm(load_model(models / f"{name}.onnx")).model
        allowed = {node.name for node in model.nodes if node.op_type in ops} if ops else None
        regions = find_regions(model)
        return SchemeSpace(model, backend().capabilities(), allowed=allowed, regions=regions)

    return make


@pytest.fixture
def drive() -> Callable[..., list[Trial]]:
    """Run a strategy against a cost; a cost of ``None`` is a failed build. One layer a node in profiles."""

    def run(
        make: Any,
        space: SchemeSpace,
        cost: Cost,
        *,
        trials: int = 60,
        seed: int = 0,
        batch: int = 1,
        sqnr_db: Callable[[Placement], float] | None = None,
        **setup: Any,
    ) -> list[Trial]:
        strategy = make(
            SearchSetup(space=space, clock="cpu", trials=trials, **setup), np.random.default_rng(seed)
        )
        told: list[Trial] = []
        best = float("inf")
        while len(told) < trials and (proposals := strategy.ask(batch)):
            assert len(proposals) <= batch
            answers = []
            for proposal in proposals:
                ratio = cost(proposal.placement)
                won = ratio is not None and ratio < MARGIN * best
                best = ratio if won and ratio is not None else best
                answers.append(
                    Trial(
                        number=len(told) + len(answers),
                        phase=proposal.phase,
                        placement=proposal.placement,
                        status="failed" if ratio is None else "ok",
                        ratio=ratio,
                        incumbent=won,
                        sqnr_db=None if sqnr_db is None else sqnr_db(proposal.placement),
                        layers=layers(space) if proposal.profile else (),
                    )
                )
            strategy.tell(answers)
            told += answers
        if len(told) < trials:
            assert strategy.done()
            assert not strategy.ask()
        return told

    return run


def layers(space: SchemeSpace) -> tuple[LayerTime, ...]:
    """A profile in which later nodes take longer."""
    return tuple(
        LayerTime(name=node.name, op_type=node.op_type, milliseconds=1.0 + node.index, nodes=(node.name,))
        for node in space.model.nodes
    )


@pytest.fixture
def learnt() -> Callable[[int], tuple[CostModel, Oracle]]:
    """A cost model that has seen the pure builds of a made-up device, with that device, by seed."""

    def make(seed: int = 0) -> tuple[CostModel, Oracle]:
        space = small_space()
        oracle = Oracle(space, seed)
        asked = [Proposal(placement=p, phase="pure", profile=True) for p in pure_placements(space)]
        trials = [oracle.answer(proposal) for proposal in asked]
        costs = CostModel(space, fuse(space, (trial.layers for trial in trials)))
        costs.learn(trials)
        return costs, oracle

    return make
