"""Looks during a search: how much the ratio of two builds changes from one time to another.

A measurement of some seconds meets the machine in one state: its frequency, its neighbours, where memory lies. States
that last longer change the ratio itself, which neither more rounds nor more builds within these seconds show. So during
a search two builds that stay open, the reference and the incumbent, are timed against each other again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError
from qdqspec.measurement.memory import HasMemory, has_memory
from qdqspec.measurement.race import Turn, settle
from qdqspec.measurement.stats import log_ratios, time_deviation
from qdqspec.types import Clock, Samples

APART = 20  # durations of a look pass before the next one: looks take a twentieth of a search
LEAST_SECONDS = 5.0  # between two looks
ROUNDS, FEWEST, MOST_SECONDS = 6, 3, 0.5  # of a look; after so long no further round begins


class Looks:
    """The looks of one search. ``seconds`` is the duration of the last one; before the first, of what it will build."""

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
        for number in range(ROUNDS):
            if number >= FEWEST and self._now() - started > MOST_SECONDS:
                break
            for position in self._random.permutation(2):
                samples[position] += self._turn.sample(engines[position])
        theirs, ours = (taken.on(self._clock) for taken in samples)
        self._series[-1].append(log_ratios(ours, theirs))
