"""The default search: whole-model builds with pure labels, then compositions from their profiles.

P1 builds the model with one label everywhere, where neighbours agree as they will in the end, so that each
operator's time under each label is read off with the least bias. P2 composes the best label of each fusion
block, with the cost of crossing between float and integer counted not at all, half and full, builds these,
learns from their profiles, and goes on while a round still wins a race. May import floors 0 to 3.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.blocks import Block, CostModel, fuse, unit_labels
from qdqspec.types import Label, Placement, Trial

SHARES = (0.0, 0.5, 1.0)  # how much a crossing counts in a composition
ROUNDS = 5
PATIENCE = 2  # rounds without a won race before it ends: each still teaches the cost model
LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

Steps = Generator[list[Proposal], list[Trial], None]


class Attribution:
    """Ask/tell over the phases P1 and P2, written as one generator: it yields questions and receives answers."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:  # noqa: ARG002 - the seam's signature; these phases draw no lots
        self._setup = setup
        self._asked: set[str] = set()
        self._waiting: list[Proposal] = []
        self._answers: list[Trial] = []
        self._open = 0
        self._steps = self._phases(setup.space)
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while answers to earlier ones are awaited, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._open += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Take the answers; when those of a whole step are there, think of the next step."""
        self._answers.extend(trials)
        self._open -= len(trials)
        if not self._waiting and not self._open:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the phases have ended."""
        return not self._waiting and not self._open

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the phases to their next step that asks something new."""
        try:
            while not self._waiting:
                proposals = next(self._steps) if answers is None else self._steps.send(answers)
                self._waiting = self._unasked(proposals)
                answers = []
        except StopIteration:
            pass

    def _unasked(self, proposals: Iterable[Proposal]) -> list[Proposal]:
        fresh = []
        for proposal in proposals:
            if proposal.placement.digest not in self._asked:
                self._asked.add(proposal.placement.digest)
                fresh.append(proposal)
        return fresh

    def _phases(self, space: SchemeSpace) -> Steps:
        seen = yield [
            _profiled(placement, "pure") for placement in (*pure_placements(space), *self._setup.seeds)
        ]
        trials = [trial for trial in seen if trial.ok and trial.layers]
        blocks = fuse(space, (trial.layers for trial in trials))
        costs = CostModel(space, blocks)
        winless = 0
        for _ in range(ROUNDS):
            for trial in trials:
                costs.learn(trial, dict(trial.placement.labels))
            trials = yield [_profiled(p, "compose") for p in compositions(space, blocks, costs)]
            winless = 0 if any(trial.incumbent for trial in trials) else winless + 1
            if winless == PATIENCE or not trials:
                return


def pure_placements(space: SchemeSpace) -> list[Placement]:
    """The reference, everything quantized, linear operators alone with float and with integer outputs."""
    linear: dict[str, Label] = {unit.id: unit.full for unit in space.units if unit.op_type in LINEAR}
    choices: list[Mapping[str, Label]] = [{}, space.everything(), space.uniform("in-only"), linear]
    return [space.resolve(labels) for labels in choices]


def compositions(space: SchemeSpace, blocks: Sequence[Block], costs: CostModel) -> list[Placement]:
    """The best labelling by the cost model, for each share of the crossing cost."""
    return [space.resolve(unit_labels(space, blocks, costs.compose(share))) for share in SHARES]


def _profiled(placement: Placement, phase: str) -> Proposal:
    return Proposal(placement=placement, phase=phase, profile=True)


strategy = Attribution
