"""Base class of strategies written as one generator, which yields proposals and receives their trials."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

from qdqspec.search._guide import Guide
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.types import Placement, Trial

Steps: TypeAlias = Generator[list[Proposal], list[Trial], None]


UNTOLD_EPS = 0.01  # smallest significant difference if no trial reports one


class Stepwise:
    """Ask and tell over a generator.

    Repeated proposals, and those whose task metric is expected to miss its limit, are dropped and never answered.
    ``eps`` is the smallest significant difference, as trials report it; ``guide`` predicts SQNRs without builds.
    """

    def __init__(self, steps: Steps, setup: SearchSetup) -> None:
        self.eps = UNTOLD_EPS
        self.guide = Guide(setup.accuracy)
        self._limits = setup
        self._steps = steps
        self._asked: dict[tuple[str, tuple[str, ...]], bool] = {}  # whether it was to be timed
        self._waiting: list[Proposal] = []
        self._answers: list[Trial] = []
        self._open = 0
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while earlier ones are unanswered, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._open += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
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
        """Whether timing a placement of the whole model was not requested yet, under any labels."""
        return not self._asked.get((placement.digest, ()), False)

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to be below a binding SQNR limit."""
        return self.is_new(placement) and (
            not self.is_bound or self.guide.admits(placement, self._limits.min_sqnr_db)
        )

    @cached_property
    def is_bound(self) -> bool:
        """Whether the SQNR limit is binding, decided once from the prediction for everything quantized."""
        return not self._limits.pareto and self.guide.is_binding(self._limits.space, self._limits.min_sqnr_db)

    @property
    def asked(self) -> int:
        """The number of placements requested, parts included."""
        return len(self._asked)

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the generator to its next step with a new proposal."""
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
            # One that was only measured for accuracy may still be raced; a raced one was measured as well.
            if key not in self._asked or (proposal.timed and not self._asked[key]):
                self._asked[key] = proposal.timed
                if self._may_win(proposal):
                    fresh.append(proposal)
        return fresh

    def _may_win(self, proposal: Proposal) -> bool:
        """Whether no rehearsal shows that a candidate misses the task metric's limit; those of the user may always."""
        placement = proposal.placement
        if self._limits.min_accuracy is None or not proposal.timed or proposal.subgraph:
            return True
        return placement in self._limits.seeds or self.keeps_metric(placement)

    def keeps_metric(self, placement: Placement) -> bool:
        """Whether a placement is not expected to miss the limit of the task metric."""
        return self.guide.keeps_metric(placement) is not False
