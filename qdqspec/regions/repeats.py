"""Repeated sequences of rows, such as the layers of a network."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

_WIDEST = 16  # rows of one repetition
_FEWEST = 3  # repetitions; fewer are written out


class Run(NamedTuple):
    """``width`` rows from ``start`` on, repeated ``times`` times."""

    start: int
    width: int
    times: int

    @property
    def end(self) -> int:
        """Index of the row after this run."""
        return self.start + self.width * self.times


def runs_of(rows: Sequence[Hashable]) -> list[Run]:
    """All rows as runs, from the front; rows that repeat fewer than three times in sequence are runs of one."""
    found: list[Run] = []
    start = 0
    while start < len(rows):
        ways = [Run(start, width, _times(rows, start, width)) for width in range(1, _WIDEST + 1)]
        best = max((way for way in ways if way.times >= _FEWEST), key=_spared, default=Run(start, 1, 1))
        found.append(best)
        start = best.end
    return found


def _spared(run: Run) -> int:
    """Number of rows that need not be written."""
    return run.width * (run.times - 1)


def _times(rows: Sequence[Hashable], start: int, width: int) -> int:
    """Number of consecutive repetitions of the ``width`` rows from ``start`` on."""
    end = start + width
    while end < len(rows) and rows[end] == rows[end - width]:
        end += 1
    return (end - start) // width
