"""Base class of strategies written as one generator, which yields proposals and receives their trials."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, TypeVar

from qdqspec.parity.gate import NoiseBar
from qdqspec.search._guide import Guide
from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.search.labels import spent_by_unit
from qdqspec.types import Label, Placement, Trial

Result = TypeVar("Result")
Steps: TypeAlias = Generator[list[Proposal], list[Trial], Result]

DEFAULT_EPS = 0.01  # smallest significant difference if no trial reports one
REHEARSALS = 6  # placements that search for the noise at which a task metric is at its limit
BRACKET_DB = (
    1.0  # below an SQNR that missed the metric's limit, from which on placements are expected to miss it
)


class Stepwise:
    """Ask and tell over a generator.

    Repeated proposals, and those whose task metric is expected to miss its limit, are dropped and never answered.
    ``eps`` is the smallest significant difference, as trials report it; ``guide`` predicts SQNRs without builds;
    ``bar`` estimates the SQNR at which a task metric meets its limit.
    """

    def __init__(self, steps: Steps[None], setup: SearchSetup) -> None:
        """``steps`` runs to its first proposals: a subclass sets its own attributes before."""
        self.eps = DEFAULT_EPS
        self.setup = setup
        self.space = setup.space
        self.guide = Guide(setup.accuracy, setup.space)
        self.bar = NoiseBar()  # estimate from scored and rehearsed placements
        self._spent = spent_by_unit(setup.space, ())  # milliseconds of each unit in floating point
        self._steps = steps
        self._asked: dict[tuple[str, tuple[str, ...]], bool] = {}  # whether it was to be timed
        self._waiting: list[Proposal] = []  # of the present step, not yet asked for
        self._answers: list[Trial] = []
        self._unanswered = 0
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while earlier ones are unanswered, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._unanswered += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
        self.eps = next((trial.eps for trial in trials if trial.eps is not None), self.eps)
        for trial in trials:
            if trial.layers and not trial.placement.sites and not trial.subgraph:
                self._spent = spent_by_unit(self.space, trial.layers)
            self.guide.learn(trial)
            if self.setup.min_accuracy is not None:
                self.bar.learn(trial, self.setup.min_accuracy)
        self._answers.extend(trials)
        self._unanswered -= len(trials)
        self._waiting = list(filter(self._may_be_built, self._waiting))
        if not self._waiting and not self._unanswered:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the steps have ended."""
        return not self._waiting and not self._unanswered

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
                if self._may_be_built(proposal):
                    fresh.append(proposal)
        return fresh

    def _may_be_built(self, proposal: Proposal) -> bool:
        """Whether a proposal is no candidate, or not expected to miss the metric's limit, by builds so far too."""
        return not proposal.timed or bool(proposal.subgraph) or self.keeps_metric(proposal.placement)

    def first_proposals(self) -> list[Proposal]:
        """The reference, which is profiled, and the seeds."""
        reference = profiled(self.space.resolve({}), "pure")
        return [reference, *(Proposal(placement=seed, phase="seed") for seed in self.setup.seeds)]

    def is_new(self, placement: Placement) -> bool:
        """Whether timing a placement of the whole model was not requested yet, under any labels."""
        return not self._asked.get((placement.digest, ()), False)

    # ---- limits ---------------------------------------------------------------------------------

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to be below a binding SQNR limit or that of the task metric."""
        return (
            self.is_new(placement)
            and self.guide.admits(placement, self.setup.min_sqnr_db if self.is_bound else None)
            and self.keeps_metric(placement)
        )

    @property
    def least_db(self) -> float | None:
        """The smallest SQNR worth aiming at: the limit, or the estimate from placements with too low a score."""
        return max((db for db in (self.setup.min_sqnr_db, self.bar.next_db) if db is not None), default=None)

    @property
    def is_limited(self) -> bool:
        """Whether the SQNR limit is binding, or a placement missed the task metric's limit."""
        return self.is_bound or bool(self.bar.lost)

    @cached_property
    def is_bound(self) -> bool:
        """Whether the SQNR limit is binding, decided once from the prediction for everything quantized."""
        return not self.setup.pareto and self.guide.is_binding(self.setup.min_sqnr_db)

    @cached_property
    def everything_keeps_metric(self) -> bool:
        """Whether everything quantized is not expected to miss the limit of the task metric; true without one."""
        return self.keeps_metric(self.space.resolve(self.space.everything()))

    def keeps_metric(self, placement: Placement) -> bool:
        """Whether a placement is not expected to miss the limit of the task metric; those of the user may always.

        One with clearly more noise than a placement that missed it is expected to, whatever a rehearsal on few samples
        shows.
        """
        if self.setup.min_accuracy is None or placement in self.setup.seeds:
            return True
        if self.bar.lost and not self.guide.admits(placement, self.bar.rejected_db - BRACKET_DB):
            return False
        keeps = self.guide.keeps_metric(placement)
        if keeps is not None and (db := self.guide.predicted_db(placement)) is not None:
            self.bar.rehearse(placement, db, kept=keeps)
        return keeps is not False

    def within_limits(self, made: Callable[[float], Placement | None]) -> Placement | None:
        """The placement ``made`` for the lowest SQNR at which it is expected to meet the limits; ``None`` for none.

        Each rehearsal of the task metric moves that SQNR, until it is known to `BRACKET_DB`.
        """
        best = None
        for _ in range(REHEARSALS):
            least = self.least_db
            placement = None if least is None else made(least)
            if placement is None:
                break
            if self.keeps_metric(placement):
                best = placement
                if min(self.bar.kept, default=0.0) - self.bar.rejected_db < BRACKET_DB or not self.bar.lost:
                    break
        return best

    def thinned(self, labels: Mapping[str, Label]) -> Placement:
        """The labels without the units with the most noise for their time, as few as limit and task metric require.

        All of them where no limit is binding; none where no placement is expected to meet the limits.
        """
        is_limited = not self.everything_keeps_metric or self.is_limited
        if not is_limited or self.least_db is None:
            return self.space.resolve(labels)
        found = self.within_limits(lambda least: self.guide.thinned(labels, least, self._spent))
        return found or self.space.resolve({})

    def thinned_everything(self) -> list[Placement]:
        """Everything quantized, in each format, `thinned`, without placements that are not worth a build."""
        everything = (self.space.everything(choice.name) for choice in self.space.choices)
        return [placed for placed in map(self.thinned, everything) if self.is_worth_building(placed)]
