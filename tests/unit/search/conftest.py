"""Searches without a device: a cost function replaces building, timing and racing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searches import pure_placements

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import load_model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.energy import Energy
from qdqspec.testing import strategies
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import Placement, Trial
from tests.support.lab import MakeLab, lab_in

Cost = Callable[[Placement], float]


@pytest.fixture
def space_of(models: Path) -> Callable[..., SchemeSpace]:
    """The search space of an example model, limited to the nodes of the given operators if there are any.

    ``changed`` are changes of the capabilities of ONNX Runtime.
    """

    def make(name: str = "digits_resnet", *ops: str, **changed: object) -> SchemeSpace:
        model = fold_batchnorm(load_model(models / f"{name}.onnx")).model
        allowed = {node.name for node in model.nodes if node.op_type in ops} if ops else None
        regions = find_regions(model)
        capabilities = replace(backend().capabilities(), **changed)
        return SchemeSpace(model, capabilities, allowed=allowed, regions=regions)

    return make


class Priced(Oracle):
    """A simulated device on which placements cost what a function says, with SQNRs of another function.

    A part of the model has the ratio ``alone`` to the same part in float.
    """

    def __init__(self, space: SchemeSpace, cost: Cost, sqnr_db: Cost | None, alone: Cost) -> None:
        self.cost = cost  # type: ignore[method-assign]
        super().__init__(space)
        self.sqnr_db, self.alone = sqnr_db or (lambda _: None), alone

    def answer(self, proposal: Proposal) -> Trial:
        best, placement = self._best, proposal.placement
        trial = replace(super().answer(proposal), sqnr_db=self.sqnr_db(placement))
        if not proposal.subgraph:
            return trial
        self._best = best
        ratio = self.alone(placement) if placement.sites else 1.0
        return replace(trial, subgraph=proposal.subgraph, incumbent=False, layers=(), ratio=ratio)


@pytest.fixture
def drive() -> Callable[..., list[Trial]]:
    """Run a strategy with a cost function."""

    def run(
        make: Any,
        space: SchemeSpace,
        cost: Cost,
        *,
        trials: int = 60,
        batch: int = 1,
        sqnr_db: Cost | None = None,
        alone: Cost = lambda _: 0.5,
        **setup: Any,
    ) -> list[Trial]:
        asked = SearchSetup(space=space, trials=trials, **setup)
        strategy = make(asked, np.random.default_rng(0))
        found = strategies.drive(strategy, Priced(space, cost, sqnr_db, alone), trials=trials, batch=batch)
        assert len(found) == trials or (strategy.done() and not strategy.ask())
        return found

    return run


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
