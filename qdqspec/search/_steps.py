"""A strategy written as one generator: it yields proposals and receives their trials. Floors 0 to 3."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

from qdqspec.search._guide import Guide
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.types import Placement, Trial

Steps: TypeAlias = Generator[list[Proposal], list[Trial], None]


UNTOLD_EPS = 0.01  # what a difference must exceed where no trial tells


class Stepwise:
    """Ask/tell over a generator. What was asked before is dropped from what it yields, and never answered.

    ``eps`` is the smallest difference that counts, as trials report it; ``guide`` predicts SQNRs without builds.
    """

    def __init__(self, steps: Steps, setup: SearchSetup) -> None:
        self.eps = UNTOLD_EPS
        self.guide = Guide(setup.accuracy)
        self._limits = setup
        self._steps = steps
        self._asked: dict[tuple[str, tuple[str, ...]], bool] = {}  # whether to be timed
        self._waiting: list[Proposal] = []
        self._answers: list[Trial] = []
        self._open = 0
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while answers to earlier ones are awaited, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._open += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Take the answers; when those of a whole step are there, think of the next step."""
        self.eps = next((trial.eps for trial in trials if trial.eps is not None), self.eps)
        for trial in trials:
            self.guide.learn(trial)
        self._answers.extend(trials)
        self._open -= len(trials)
        if not self._waiting and not self._open:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the steps have ended."""
        return not self._waiting and not self._open

    def is_new(self, placement: Placement) -> bool:
        """Whether a placement of the whole model was not asked to be timed yet, by any labels."""
        return not self._asked.get((placement.digest, ()), False)

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to be below the SQNR limit where that matters."""
        return self.is_new(placement) and (
            not self.is_bound or self.guide.admits(placement, self._limits.min_sqnr_db)
        )

    @cached_property
    def is_bound(self) -> bool:
        """Whether the SQNR limit excludes placements, as everything quantized shows when this is first asked."""
        return not self._limits.pareto and self.guide.is_binding(self._limits.space, self._limits.min_sqnr_db)

    @property
    def asked(self) -> int:
        """How many placements were asked for, those of parts too."""
        return len(self._asked)

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the generator to its next step that asks something new."""
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
            key = (proposal.placement.digest, proposal.subgraph)
            # One that was only heard may still be raced; one that was raced was heard as well.
            if key not in self._asked or (proposal.timed and not self._asked[key]):
                self._asked[key] = proposal.timed
                fresh.append(proposal)
        return fresh
