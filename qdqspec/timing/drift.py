"""The variation of a ratio between times, from two builds that stay open during a search.

A measurement of some seconds is made in one state of the machine, which changes the ratio itself. So the reference and
the incumbent are timed against each other repeatedly (docs/decisions/0006).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.backends.base import Engine
from qdqspec.backends.memory import HasMemory, has_memory
from qdqspec.errors import BackendError
from qdqspec.timing.race import settle
from qdqspec.timing.stats import Deviation, log_ratios, time_deviation
from qdqspec.types import Clock, Samples


@dataclass(kw_only=True)
class DriftMonitor:
    """Looks at the reference and the incumbent of one search from time to time.

    Between two looks ``apart`` times the duration of a look passes, and ``least_seconds``: looks take a twentieth of a
    search; more of them know the variation better, and leave less time to search. A look has ``rounds`` pairs of turns.
    """

    clock: Clock
    random: np.random.Generator
    memory: HasMemory = has_memory
    now: Callable[[], float] = time.monotonic
    apart: float = 20.0
    least_seconds: float = 5.0
    rounds: int = 6
    reference: Engine | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)  # the duration of the last look
    series: list[list[Floats]] = field(default_factory=list, init=False)  # log ratios by incumbent and look
    _beside: Engine | None = field(default=None, init=False)  # the incumbent of the last series

    def __post_init__(self) -> None:
        self._ended = self.now()

    @property
    def deviation(self) -> Deviation:
        """The deviation of a log ratio between times, and its degrees of freedom; see `time_deviation`."""
        return time_deviation(self.series)

    def take_if_due(
        self, incumbent: Engine, open_reference: Callable[[], Engine], build_seconds: float
    ) -> None:
        """Look at both if the last look is long enough ago and memory allows it. An engine that fails ends the look.

        The reference is opened once, which takes ``build_seconds``, and stays open.
        """
        started = self.now()
        lasts = self.seconds or build_seconds
        if started - self._ended < max(self.least_seconds, self.apart * lasts):
            return
        try:
            if self.reference is None and self.memory([incumbent], 1):
                self.reference = open_reference()
            if self.reference is not None:
                self._look(self.reference, incumbent)
        except BackendError:
            self.close()
        self._ended = self.now()
        self.seconds = self._ended - started

    def close(self) -> None:
        """Close the reference; the looks taken so far stay."""
        if self.reference is not None:
            self.reference.close()
        self.reference = self._beside = None

    def _look(self, reference: Engine, incumbent: Engine) -> None:
        if incumbent is not self._beside:
            self._beside = incumbent
            self.series.append([])
        engines, samples = (incumbent, reference), [Samples(), Samples()]
        turn = min((settle(engine, self.clock) for engine in engines), key=lambda each: each.runs)
        for _ in range(self.rounds):
            for side in self.random.permutation(2):
                samples[side] += turn.sample(engines[side])
        self.series[-1].append(log_ratios(*(taken.on(self.clock) for taken in samples)))
