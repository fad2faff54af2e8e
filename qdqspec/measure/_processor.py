"""Which processor the engines that are compared share. Standard library only.

On a busy machine processors are not equally fast: another guest on the same core takes a third of one and nothing of
the next, for seconds at a time. A scheduler leaves processes that take turns where they were, so that of two engines
one would run on the fast processor and the other on the slow one all through a race. With both on one, whatever
befalls it befalls both (docs/decisions/0033).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # Linux tells one of them where cores are not alike


@contextmanager
def one_processor() -> Iterator[None]:
    """Keep this thread on one processor meanwhile: the same in every process that may use the same ones.

    Where the system has no way to ask for that, nothing happens.
    """
    usable: set[int] = set()
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            usable = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {chosen(usable)})
    try:
        yield
    finally:
        if usable:
            with suppress(OSError):
                os.sched_setaffinity(0, usable)


def chosen(usable: Collection[int], system: Path = _SYSTEM) -> int:
    """One of the fastest, and the last of these: interrupts go to the first."""
    return max(usable, key=lambda number: (_speed(system / f"cpu{number}"), number))


def _speed(folder: Path) -> int:
    """How fast a processor can be, in whatever unit; 0 where that is not told."""
    for name in _SPEEDS:
        with suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="ascii"))
    return 0
