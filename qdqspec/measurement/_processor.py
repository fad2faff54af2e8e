"""Pins compared engines to the same core.

On a busy machine cores are not equally fast: another guest on the same core takes a third of one and nothing of the
next, for seconds at a time. A scheduler does not move processes that take turns, so that one of two engines would run
on the fast core and the other on the slow one for a whole race. On a common core, disturbances affect both
(docs/decisions/0033).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # Linux reports one of them if cores differ


@contextmanager
def one_processor() -> Iterator[None]:
    """Pin this thread to one core: the same one in every process with the same set of allowed cores.

    Does nothing if the system does not support it.
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
    """The last of the fastest cores: interrupts are handled by the first."""
    return max(usable, key=lambda number: (_speed(system / f"cpu{number}"), number))


def _speed(folder: Path) -> int:
    """The speed of a core in an arbitrary unit; 0 if the system does not report it."""
    for name in _SPEEDS:
        with suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="ascii"))
    return 0
