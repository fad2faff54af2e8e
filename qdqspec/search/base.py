"""The seam of a search strategy: it is asked for placements and told how they fared. It never measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.types import Clock, Label, Placement, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A placement to build, and why: ``phase`` enters the journal, ``profile`` asks for layer times.

    One that is not ``timed`` is only run for its accuracy; one with a ``subgraph`` is built of these nodes alone,
    and its trial's ratio is to the same nodes in float. Neither is a candidate, nor counts against the budget;
    their phases are among `qdqspec.types.NOT_CANDIDATES`.
    """

    placement: Placement
    phase: str
    profile: bool = False
    timed: bool = True
    subgraph: tuple[str, ...] = ()


class AccuracyOracle(Protocol):
    """Predicts the SQNR of placements without building them.

    Deterministic: its answers depend on the case and on the trials learnt, in their order, so that a resumed search
    asks for the same placements. Nothing is computed before the first question.
    """

    @property
    def doubt_db(self) -> float:
        """The standard deviation of its predictions, in dB, as built candidates have shown it."""
        ...

    def noise(self) -> Mapping[tuple[str, Label], float] | None:
        """Noise power over signal power of each (unit, label) alone, where noise adds up; ``None`` if unknown."""
        ...

    def predicted_db(self, placement: Placement) -> float | None:
        """The SQNR that a build of a placement is expected to have; ``None`` where it cannot be computed."""
        ...

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate what the backend adds to the error computed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """All a strategy may know before its first question.

    ``seeds`` are placements worth trying first, and ``proved`` the digests of those that a whole search on this
    device has come to, on this model or a sister of it.
    ``min_sqnr_db`` is what a candidate must reach to win; with ``pareto`` accuracy is an objective of its own.
    ``min_accuracy`` is the same for a task metric, which is taken of would-be winners alone: their trials carry it,
    and those below it are not the incumbent. Where none of the three is asked for, trials carry no SQNR.
    ``accuracy`` predicts SQNRs without builds where accuracy limits or guides the search and that is possible.
    ``fused`` are nodes that run as one kernel, where that was asked for before the first build.
    """

    space: SchemeSpace
    clock: Clock
    preset: str = "default"
    trials: int = 60
    seeds: tuple[Placement, ...] = ()
    proved: frozenset[str] = frozenset()
    min_sqnr_db: float | None = None
    min_accuracy: float | None = None
    pareto: bool = False
    fused: tuple[tuple[str, ...], ...] = ()
    accuracy: AccuracyOracle | None = None


class Strategy(Protocol):
    """Ask, build, tell, until done. Deterministic for one random generator and one sequence of trials."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None: ...

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return at most ``n`` placements not asked for before; none when it has nothing more to ask."""
        ...

    def tell(self, trials: Sequence[Trial]) -> None:
        """Take in what was measured, failures included.

        From the first on each trial says under ``eps`` what share of time a difference must exceed to count: twice
        what builds of one model were seen to differ by, right after the reference was built.
        """
        ...

    def done(self) -> bool:
        """Whether it would ask for nothing more."""
        ...
