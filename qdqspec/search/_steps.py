"""Base class of strategies written as one generator, which yields proposals and receives their trials."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np

from qdqspec.parity.gate import NoiseBar
from qdqspec.search._classes import spent_by_unit
from qdqspec.search._guide import Guide
from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.types import Label, Placement, Trial

Result = TypeVar("Result")
Steps: TypeAlias = Generator[list[Proposal], list[Trial], Result]

DEFAULT_EPS = 0.01  # smallest significant difference if no trial reports one
MARGINS_DB = (3.0, 6.0, 10.0)  # added to the target where predictions are too high
APPROACHES = 6  # placements that search for the noise at which a task metric is at its limit
UNLIKELY_DB = 10.0  # of everything quantized: below it, placements with less noise are judged first
BRACKET_DB = 1.0  # between placements that miss and meet a task metric's limit, at which rehearsals of it end


class Stepwise:
    """Ask and tell over a generator.

    Repeated proposals, and those whose task metric is expected to miss its limit, are dropped and never answered.
    ``eps`` is the smallest significant difference, as trials report it; ``guide`` predicts SQNRs without builds;
    ``bar`` estimates the SQNR at which a task metric meets its limit.
    """

    def __init__(self, steps: Steps[None], setup: SearchSetup) -> None:
        """``steps`` runs to its first proposals: a subclass sets its own attributes before."""
        self.eps = DEFAULT_EPS
        self.guide = Guide(setup.accuracy, setup.space)
        self.bar = NoiseBar()  # estimate from scored and rehearsed placements
        self._setup = setup
        self._space = setup.space
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
            self.guide.learn(trial)
            if self._setup.min_accuracy is not None:
                self.bar.learn(trial, self._setup.min_accuracy)
        self._answers.extend(trials)
        self._unanswered -= len(trials)
        self._waiting = list(filter(self._may_be_built, self._waiting))
        if not self._waiting and not self._unanswered:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def _first_proposals(self) -> list[Proposal]:
        """The reference, which is profiled, and the seeds."""
        reference = profiled(self._space.resolve({}), "pure")
        return [reference, *(Proposal(placement=seed, phase="seed") for seed in self._setup.seeds)]

    def done(self) -> bool:
        """Whether the steps have ended."""
        return not self._waiting and not self._unanswered

    def is_new(self, placement: Placement) -> bool:
        """Whether timing a placement of the whole model was not requested yet, under any labels."""
        return not self._asked.get((placement.digest, ()), False)

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to be below a binding SQNR limit or that of the task metric."""
        return (
            self.is_new(placement)
            and self.guide.admits(placement, self._refused_below_db)
            and self._may_keep_metric(placement)
        )

    @property
    def _refused_below_db(self) -> float | None:
        """The SQNR below which a placement is refused; ``None`` if there is no such value.

        That is a binding limit, or the highest SQNR at which a placement missed the task metric's limit. Once one that
        meets it is known too, it is the estimate between them.
        """
        bar = self.bar.next_db if self.bar.kept else self.bar.rejected_db
        limit = self._setup.min_sqnr_db if self.is_bound else None
        return max((db for db in (limit, bar) if db is not None and np.isfinite(db)), default=None)

    @property
    def least_db(self) -> float | None:
        """The smallest SQNR worth aiming at: the limit, or the estimate from placements with too low a score."""
        return max((db for db in (self._setup.min_sqnr_db, self.bar.next_db) if db is not None), default=None)

    @property
    def is_limited(self) -> bool:
        """Whether the SQNR limit is binding, or a placement missed the task metric's limit."""
        return self.is_bound or bool(self.bar.lost)

    @cached_property
    def is_bound(self) -> bool:
        """Whether the SQNR limit is binding, decided once from the prediction for everything quantized."""
        return not self._setup.pareto and self.guide.is_binding(self._setup.min_sqnr_db)

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
        """Whether a proposal is no candidate, or not shown to miss the task metric's limit, by builds so far too."""
        return not proposal.timed or bool(proposal.subgraph) or self._may_keep_metric(proposal.placement)

    def _may_keep_metric(self, placement: Placement) -> bool:
        """Whether no rehearsal shows that a candidate misses the task metric's limit; those of the user may always."""
        is_free = self._setup.min_accuracy is None or placement in self._setup.seeds
        return is_free or self.keeps_metric(placement)

    def keeps_metric(self, placement: Placement) -> bool:
        """Whether a placement is not expected to miss the limit of the task metric.

        One with clearly more noise than a build that missed it is expected to, whatever a rehearsal on few samples
        shows.
        """
        missed_db = self.bar.missed_db
        if missed_db is not None and not self.guide.admits(placement, missed_db - BRACKET_DB):
            return False
        keeps = self.guide.keeps_metric(placement)
        if keeps is not None and (db := self.guide.predicted_db(placement)) is not None:
            self.bar.rehearse(placement, db, kept=keeps)
        return keeps is not False

    @cached_property
    def everything(self) -> Placement:
        """Everything quantized, in the first format."""
        return self._space.resolve(self._space.everything())

    @cached_property
    def is_hardly_kept(self) -> bool:
        """Whether everything quantized has so low an SQNR that it is unlikely to keep the task metric."""
        if self._setup.min_accuracy is None:
            return False
        roughly_db = self.guide.roughly_db(self.everything)
        return roughly_db is not None and roughly_db < UNLIKELY_DB

    @cached_property
    def everything_keeps_metric(self) -> bool:
        """Whether everything quantized is not expected to miss the limit of the task metric; true without one."""
        return self._setup.min_accuracy is None or self.keeps_metric(self.everything)

    def rehearse_metric(self, past: Sequence[Trial]) -> None:
        """Bracket the SQNR at which the task metric meets its limit, without builds, if everything quantized misses it.

        The placements have fewer and fewer units, those with the most noise for their time left out first.
        ``past`` begins with the trial of the reference.
        """
        if self.everything_keeps_metric:
            return
        space, everything, spent = self._space, self._space.everything(), self._spent(past)
        for _ in range(APPROACHES):
            aim = self.least_db
            if aim is None or min(self.bar.kept, default=np.inf) - self.bar.rejected_db < BRACKET_DB:
                return
            placement = space.resolve(self.guide.thinned(everything, aim, spent))
            if not placement.sites or placement.digest in self.bar.found:
                return
            self.keeps_metric(placement)

    def thinned(
        self, labels: Mapping[str, Label], past: Sequence[Trial], *, rough: bool = False
    ) -> Mapping[str, Label]:
        """The labels without the units with the most noise for their time, as few as limit and task metric require.

        All of them where no limit is binding; none where no placement is expected to meet the limits. With ``rough``
        the noise of neighbours together ranks the units.
        """
        least = self.least_db
        if least is None or not self.is_limited:
            return labels
        spent = self._spent(past)
        for more in (0.0, *MARGINS_DB):
            found = self.guide.thinned(labels, least + more, spent, rough=rough)
            if self._setup.min_accuracy is None or self.keeps_metric(self._space.resolve(found)):
                return found
        return {}

    def _thinned_everything(self, past: Sequence[Trial]) -> list[Placement]:
        """Everything quantized, in each format, `thinned`."""
        everything = (self._space.everything(choice.name) for choice in self._space.choices)
        return [self._space.resolve(self.thinned(labels, past)) for labels in everything]

    def _spent(self, past: Sequence[Trial]) -> dict[str, float]:
        """Milliseconds of each unit in floating point; ``past`` begins with the reference."""
        return spent_by_unit(self._space, past[0].layers if past else ())
