"""Searches without a device: a cost function replaces building, timing and racing."""

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
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.energy import Energy
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import LayerTime, Placement, Trial
from tests.support.lab import MakeLab, lab_in

Cost = Callable[[Placement], float | None]
MARGIN = 0.99  # a candidate wins a race if its time is below this share of the best


@pytest.fixture
def space_of(models: Path) -> Callable[..., SchemeSpace]:
    """The search space of an example model, limited to the nodes of the given operators if there are any."""

    def make(name: str = "digits_resnet", *ops: str) -> SchemeSpace:
        model = fold_batchnorm(load_model(models / f"{name}.onnx")).model
        allowed = {node.name for node in model.nodes if node.op_type in ops} if ops else None
        regions = find_regions(model)
        return SchemeSpace(model, backend().capabilities(), allowed=allowed, regions=regions)

    return make


@pytest.fixture
def drive() -> Callable[..., list[Trial]]:
    """Run a strategy with a cost function; ``None`` is a failed build. Profiles have one layer per node."""

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
        results: list[Trial] = []
        best = float("inf")
        while len(results) < trials and (proposals := strategy.ask(batch)):
            assert len(proposals) <= batch
            answers = []
            for proposal in proposals:
                ratio = cost(proposal.placement)
                won = ratio is not None and ratio < MARGIN * best
                best = ratio if won and ratio is not None else best
                answers.append(
                    Trial(
                        number=len(results) + len(answers),
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
            results += answers
        if len(results) < trials:
            assert strategy.done()
            assert not strategy.ask()
        return results

    return run


def layers(space: SchemeSpace) -> tuple[LayerTime, ...]:
    """A profile in which later nodes take longer."""
    return tuple(
        LayerTime(name=node.name, op_type=node.op_type, milliseconds=1.0 + node.index, nodes=(node.name,))
        for node in space.model.nodes
    )


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    return lab_in(tmp_path)


@pytest.fixture
def learnt() -> Callable[..., tuple[Energy, Oracle]]:
    """An energy that has learned from the pure builds of a simulated device, and that device, by seed."""

    def make(seed: int = 0) -> tuple[Energy, Oracle]:
        space = small_space()
        oracle = Oracle(space, seed)
        asked = [Proposal(placement=p, phase="pure", profile=True) for p in pure_placements(space)]
        return Energy.of(space, [oracle.answer(proposal) for proposal in asked]), oracle

    return make
