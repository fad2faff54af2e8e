"""The core on which engines are compared: they share it, and its caches can be displaced.

On a busy machine cores are not equally fast: another guest on the same core takes a third of one and nothing of the
next, for seconds at a time. A scheduler does not move processes that take turns, so that one of two engines would run
on the fast core and the other on the slow one for a whole race. On a common core, disturbances affect both
(docs/decisions/0033).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from qdqspec.arrays import Array

MOST_DISPLACED = 32 << 20  # bytes; more than the caches of one core, and read in a few milliseconds
_LINE = 64  # bytes of a cache line

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


class Displacer:
    """Reads as much memory as a model of ``size`` bytes has, at most 32 MB, so that caches hold less of another."""

    def __init__(self, size: int) -> None:
        self._size = min(size, MOST_DISPLACED)

    def displace(self) -> int:
        """Read the memory, which is allocated once; returns the number of cache lines read."""
        return int(self._memory[::_LINE].sum(dtype=np.int64))

    @cached_property
    def _memory(self) -> Array:
        return np.ones(self._size, np.uint8)  # written, as untouched pages would all be the same one


def own_memory() -> int:
    """The bytes of memory that this process holds, without files; 0 if the system does not report it."""
    try:
        _, resident, files, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
        return (resident - files) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
