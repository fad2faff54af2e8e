"""Times fresh builds against each other: all at once if memory allows, else two at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from qdqspec.backends.base import Engine
from qdqspec.measurement.memory import HasMemory, MemoryShortError, has_memory
from qdqspec.measurement.race import Turn
from qdqspec.measurement.together import IsSettled, Opener, Take, Together, time_together
from qdqspec.measurement.two_at_a_time import time_two_at_a_time
from qdqspec.types import Clock


class FreshBuilds:
    """Times fresh builds with ``jobs`` parallel builds; after memory was short once, only two are open at a time."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: np.random.Generator,
        exclusive: Callable[[], AbstractContextManager[object]],
        jobs: int = 1,
        memory: HasMemory = has_memory,
    ) -> None:
        self._clock: Clock = clock
        self._random = random
        self._exclusive = exclusive
        self._jobs = jobs
        self._memory = memory
        self._is_short = False

    def time(
        self,
        groups: Mapping[str, Sequence[Opener]],
        rounds: int,
        *,
        beside: Sequence[Engine] = (),
        make_room: Callable[[], None],
        take: Take = Turn.both,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Samples of each group's builds. If memory is short, ``make_room`` closes the engines in ``beside``."""
        clock, random, exclusive = self._clock, self._random, self._exclusive
        if not self._is_short:
            try:
                return time_together(
                    groups,
                    rounds,
                    clock=clock,
                    random=random,
                    exclusive=exclusive,
                    jobs=self._jobs,
                    memory=self._memory,
                    beside=beside,
                    take=take,
                    is_settled=is_settled,
                )
            except MemoryShortError:
                self._is_short = True
        make_room()
        return time_two_at_a_time(groups, rounds, clock=clock, random=random, exclusive=exclusive, take=take)
