"""The interface of a search strategy, and a base class for strategies that are written as one generator.

A strategy is asked for placements and receives their trials. It never measures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from qdqspec.qdq import SchemeSpace
from qdqspec.search.blocks import spent_by_unit
from qdqspec.search.guide import AccuracyOracle, Guide
from qdqspec.search.limits import Limits
from qdqspec.types import NOT_CANDIDATES, Placement, SearchLimits, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A placement to build: ``phase`` is written to the journal, ``profile`` requests layer times.

    A proposal with a ``subgraph`` is built of these nodes only, and raced against the same nodes in float. It is no
    candidate and does not count in the budget; its phase is among `qdqspec.types.NOT_CANDIDATES`. One that ``informs``
    is built for the times of its kernels, even if it is expected to miss a limit.
    """

    placement: Placement
    phase: str
    profile: bool = False
    informs: bool = False
    subgraph: tuple[str, ...] = ()


def profiled(placement: Placement, phase: str) -> Proposal:
    """A proposal whose layers are timed too."""
    return Proposal(placement=placement, phase=phase, profile=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """All information that a strategy has before its first proposal.

    ``seeds`` are placements to try first. ``limits`` are those of the whole search: what is known of the accuracy of
    placements, and which may win; with ``pareto`` accuracy is an objective of its own. Without limits and without
    ``pareto``, trials carry no SQNR. ``accuracy`` predicts SQNRs without builds, if accuracy matters and the model can
    be rehearsed. ``fused`` are nodes that run as one kernel, if the case requests them before the first build.
    ``trials_per_region`` limits strategy `region` for each pattern; without ``validate_groups`` strategy `subgraph`
    combines all groups that won alone at once.
    """

    space: SchemeSpace
    preset: str = "default"
    trials: int = 60
    trials_per_region: int | None = None
    validate_groups: bool = True
    seeds: tuple[Placement, ...] = ()
    limits: Limits = field(default_factory=lambda: Limits(asked=SearchLimits(min_sqnr_db=None)))
    pareto: bool = False
    fused: tuple[tuple[str, ...], ...] = ()
    accuracy: AccuracyOracle | None = None


class Strategy(Protocol):
    """Ask, build, tell, until done. Deterministic for one random generator and one sequence of trials.

    It may have a function ``refuse(space)`` that raises `ConfigError`, asked before any data is read. It may have
    ``least_gain``, the expected saving, as a share of the time, below which it stops, and ``refused``, the units with
    which no placement was built: the result states them.
    """

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None: ...

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return at most ``n`` new placements; none if it has nothing more to ask."""

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials, including failed ones.

        After the first, each trial has ``eps``, the smallest significant difference as a share of time: twice the
        difference measured between builds of one model, right after the reference was built.
        """

    def done(self) -> bool:
        """Whether it has nothing more to ask."""


Result = TypeVar("Result")
Steps: TypeAlias = Generator[list[Proposal], list[Trial], Result]


class Stepwise(ABC):
    """A strategy as a generator: `_search` yields proposals and receives their trials.

    The reference, profiled, and the seeds are proposed before. Repeated proposals, and those whose task metric is
    expected to miss its limit, are dropped and never answered. ``eps`` is the smallest significant difference, as
    trials report it; ``guide`` predicts accuracies. ``trials`` are the candidates that ran, ``failed`` the builds that
    failed.
    """

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        """The generator starts here: a subclass sets its own attributes before it calls this."""
        self.eps = 0.01
        self.random = random
        self.setup, self.space = setup, setup.space
        self.guide = Guide(
            setup.accuracy, setup.space, setup.limits, binds=not setup.pareto, always=setup.seeds
        )
        self.trials: list[Trial] = []
        self.failed: list[Trial] = []
        self._steps = self._begin()
        self._asked = set[tuple[str, tuple[str, ...]]]()
        self._waiting: list[Proposal] = []  # of the present step, not yet asked for
        self._answers: list[Trial] = []
        self._unanswered = 0
        self._advance(None)

    @abstractmethod
    def _search(self) -> Steps[None]:
        """Yield the proposals of each step; their trials are sent."""

    def _begin(self) -> Steps[None]:
        yield [
            profiled(self.space.resolve({}), "pure"),
            *(profiled(seed, "seed") for seed in self.setup.seeds),
        ]
        yield from self._search()

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
        self.trials += self.candidates_among(trials)
        self.failed += [trial for trial in trials if not trial.ok]
        self._answers.extend(trials)
        self._unanswered -= len(trials)
        self._waiting = list(filter(self._may_be_built, self._waiting))
        if self.done():
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the steps have ended."""
        return not self._waiting and not self._unanswered

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the generator to its next step with a new proposal."""
        with suppress(StopIteration):
            while not self._waiting:
                proposals = next(self._steps) if answers is None else self._steps.send(answers)
                answers = []
                for each in proposals:
                    key = each.placement.digest, each.subgraph
                    if key not in self._asked and self._may_be_built(each):
                        self._waiting.append(each)
                    self._asked.add(key)

    def _may_be_built(self, proposal: Proposal) -> bool:
        """Whether a proposal is not built to win, or not expected to miss the metric's limit, by builds so far too."""
        is_candidate = not proposal.subgraph and not proposal.informs
        return not is_candidate or self.guide.keeps_metric(proposal.placement)

    # ---- for strategies -------------------------------------------------------------------------

    @staticmethod
    def candidates_among(trials: Sequence[Trial]) -> list[Trial]:
        """The trials of candidates that ran."""
        return [trial for trial in trials if trial.ok and trial.phase not in NOT_CANDIDATES]

    @property
    def incumbent(self) -> Trial:
        """The trial of the best placement so far."""
        return next(trial for trial in reversed(self.trials) if trial.incumbent)

    @property
    def spent(self) -> dict[str, float]:
        """Milliseconds of each unit in floating point."""
        return spent_by_unit(self.space, self.trials[0].layers)

    def is_new(self, placement: Placement) -> bool:
        """Whether a placement of the whole model was not requested yet, under any labels."""
        return (placement.digest, ()) not in self._asked

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to miss a limit."""
        return self.is_new(placement) and self.guide.is_worth_building(placement)

    def fitted_everything(self, *, predictions: int = 8) -> list[Proposal]:
        """Everything quantized, in each format, as far as the limits allow; without what is not worth a build.

        For ``predictions`` see `Guide.meet`.
        """
        everything = (self.space.everything(choice.name) for choice in self.space.choices)
        placements = [self.guide.fitted(labels, self.spent, predictions=predictions) for labels in everything]
        return [profiled(placed, "pure") for placed in placements if self.is_worth_building(placed)]
