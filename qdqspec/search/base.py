"""The interface of a search strategy: it is asked for placements and receives their trials. It never measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Clock, LabelNoise, Placement, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A placement to build: ``phase`` is written to the journal, ``profile`` requests layer times.

    A proposal that is not ``timed`` is only run for its accuracy; one with a ``subgraph`` is built of these nodes only,
    and raced against the same nodes in float. Neither is a candidate or counts in the budget; their phases are among
    `qdqspec.types.NOT_CANDIDATES`. One that ``informs`` is built for the times of its kernels, even if it is expected
    to miss a limit.
    """

    placement: Placement
    phase: str
    profile: bool = False
    timed: bool = True
    informs: bool = False
    subgraph: tuple[str, ...] = ()


def profiled(placement: Placement, phase: str) -> Proposal:
    """A proposal whose layers are timed too."""
    return Proposal(placement=placement, phase=phase, profile=True)


class AccuracyOracle(Protocol):
    """Predicts the SQNR of placements without building them; nothing is computed before the first call.

    Deterministic for a case and the trials learnt, in order, so that a resumed search asks for the same placements.
    """

    @property
    def doubt_db(self) -> float:
        """The standard deviation of its predictions, in dB, estimated from built candidates."""

    def noise(self) -> LabelNoise | None:
        """Noise power over signal power of each (unit, label) alone, where noise is additive; ``None`` if unknown."""

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a build of a placement; ``None`` if it cannot be computed."""

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate how its SQNR differs from the computed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """All information that a strategy has before its first proposal.

    ``seeds`` are placements to try first. ``min_sqnr_db`` is the smallest SQNR that can win; with ``pareto`` accuracy
    is an objective of its own. ``min_accuracy`` is the same for a task metric, which is computed for race winners only.
    Without any of the three, trials carry no SQNR. ``accuracy`` predicts SQNRs without builds, if accuracy matters and
    the model can be rehearsed. ``fused`` are nodes that run as one kernel, if the case requests them before the first
    build. ``trials_per_region`` limits strategy `region` for each pattern; without ``validate_groups`` strategy
    `subgraph` combines all groups that won alone at once.
    """

    space: SchemeSpace
    clock: Clock
    preset: str = "default"
    trials: int = 60
    trials_per_region: int | None = None
    validate_groups: bool = True
    seeds: tuple[Placement, ...] = ()
    min_sqnr_db: float | None = None
    min_accuracy: float | None = None
    pareto: bool = False
    fused: tuple[tuple[str, ...], ...] = ()
    accuracy: AccuracyOracle | None = None


class Strategy(Protocol):
    """Ask, build, tell, until done. Deterministic for one random generator and one sequence of trials.

    It may have a function ``refuse(space)`` that raises `ConfigError`, asked before any data is read. It may have
    ``steps``, a text for each phase of its trials in order: if a limit ends the search, the result names the steps that
    were not reached. It may have ``least_gain``, the expected saving, as a share of the time, below which it stops: the
    result states it.
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
