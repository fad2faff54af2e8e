"""Several builds of several models timed in the same rounds: their ratios, and looks at two builds that stay open.

A measurement of some seconds is made in one state of the machine: its frequency, other guests, the placement of
memory. A change of state changes the ratio itself, and neither more rounds nor more builds within these seconds
show this. So during a search two builds that stay open, the reference and the incumbent, are timed against each
other repeatedly (`Looks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError, QdqspecError
from qdqspec.measurement.memory import HasMemory, has_memory
from qdqspec.measurement.race import Turn, settle
from qdqspec.measurement.stats import enclosed_ratios, log_ratios, predicted_ratios, time_deviation
from qdqspec.types import Clock, Interval, Samples

IsSettled: TypeAlias = Callable[["Together"], bool]  # whether what was measured decides
Take: TypeAlias = Callable[[Turn, Engine], Samples]  # how a turn is taken: `Turn.sample` or `Turn.both`


@dataclass(frozen=True, slots=True)
class Together:
    """Samples of each group's builds, and why a group has none: a group with one failure is omitted.

    ``devices`` is the number of devices that they were timed on.
    """

    samples: dict[str, list[Samples]] = field(default_factory=dict)
    failures: dict[str, QdqspecError] = field(default_factory=dict)
    devices: int = 1


def ratios_between(
    groups: Mapping[str, Sequence[Samples]],
    base: str,
    clock: Clock,
    devices: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every group's time over that of the ``base`` group, with confidence intervals for tests.

    In both conditions if all builds have both. Each group has the samples of its fresh builds; see `enclosed_ratios`,
    and `ratio_intervals` for ``times``.
    """
    return enclosed_ratios(*_conditions(groups, clock), base, devices, times)


def predictions_between(
    groups: Mapping[str, Sequence[Samples]],
    base: str,
    clock: Clock,
    devices: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every group's time over that of the ``base`` group as another program will measure it; see `predicted_ratios`."""
    return predicted_ratios(*_conditions(groups, clock), base, devices, times)


_Times: TypeAlias = dict[str, list[tuple[float, ...]]]  # of the builds, by group


def _conditions(groups: Mapping[str, Sequence[Samples]], clock: Clock) -> tuple[_Times, _Times]:
    """Times of runs in a row, and of first runs after another model, which are empty unless all builds have them."""
    steady = {name: [build.on(clock) for build in builds] for name, builds in groups.items()}
    if not all(build.first for builds in groups.values() for build in builds):
        return steady, {}
    first = {
        name: [build.first.on(clock) for build in builds if build.first] for name, builds in groups.items()
    }
    return steady, first


def common_clock(wanted: Clock, groups: Mapping[str, Sequence[Samples]]) -> Clock:
    """The clock that all samples have: wall time if a runtime reports no processor time."""
    has_cpu = all(build.cpu_ms for builds in groups.values() for build in builds)
    return wanted if has_cpu else "wall"


def joined(builds: Sequence[Samples]) -> Samples:
    """The samples of several builds, one build after the other."""
    total = Samples()
    for build in builds:
        total += build
    return total


APART = 20  # durations of a look pass before the next one: looks take a twentieth of a search
LEAST_SECONDS = 5.0  # between two looks
LOOK_ROUNDS, FEWEST_LOOK_ROUNDS = 6, 3
LOOK_SECONDS = 0.5  # after so long no further round of a look begins


class Looks:
    """The looks of one search. ``seconds`` is the duration of the last one, at first that of the builds it needs."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: np.random.Generator,
        memory: HasMemory = has_memory,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference: Engine | None = None
        self.seconds = 0.0
        self._clock: Clock = clock
        self._random = random
        self._memory = memory
        self._now = now
        self._ended = now()
        self._beside: Engine | None = None  # the engine of the last series
        self._turn = Turn.lasting(0.0)
        self._series: list[list[Floats]] = []

    @property
    def deviation(self) -> tuple[float, int]:
        """The deviation of a log ratio between times, and its degrees of freedom; see `time_deviation`."""
        return time_deviation(self._series)

    def take_if_due(self, incumbent: Engine, open_reference: Callable[[], Engine]) -> None:
        """Look at the reference and the incumbent if the last look is long enough ago and memory allows it.

        The reference is opened once and stays open. An engine that fails ends the look; a race finds the cause.
        """
        started = self._now()
        if started - self._ended < max(LEAST_SECONDS, APART * self.seconds):
            return
        try:
            if self.reference is None and self._memory([incumbent], 1):
                self.reference = open_reference()
            if self.reference is not None:
                self._take(self.reference, incumbent)
        except BackendError:
            self.close()
        self._ended = self._now()
        self.seconds = self._ended - started

    def close(self) -> None:
        """Close the reference; the looks taken so far stay."""
        if self.reference is not None:
            self.reference.close()
        self.reference = self._beside = None

    def _take(self, reference: Engine, incumbent: Engine) -> None:
        engines = reference, incumbent
        if incumbent is not self._beside:
            turns = [settle(engine, self._clock) for engine in engines]
            self._beside, self._turn = incumbent, min(turns, key=lambda turn: turn.runs)
            self._series.append([])
        else:
            for engine in engines:
                self._turn.sample(engine)
        samples = [Samples(), Samples()]
        started = self._now()
        for number in range(LOOK_ROUNDS):
            if number >= FEWEST_LOOK_ROUNDS and self._now() - started > LOOK_SECONDS:
                break
            for position in self._random.permutation(2):
                samples[position] += self._turn.sample(engines[position])
        theirs, ours = (taken.on(self._clock) for taken in samples)
        self._series[-1].append(log_ratios(ours, theirs))
