"""Rows that come again and again, as the layers of a network do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

_WIDEST = 16  # rows of a turn
_FEWEST = 3  # turns: two of a kind are told as they are


class Run(NamedTuple):
    """``width`` rows from ``start`` on, that stand there ``times`` times."""

    start: int
    width: int
    times: int

    @property
    def end(self) -> int:
        """Where the next run begins."""
        return self.start + self.width * self.times


def runs_of(rows: Sequence[Hashable]) -> list[Run]:
    """All rows as runs, from the front; what does not come three times running is a run of one."""
    found: list[Run] = []
    start = 0
    while start < len(rows):
        ways = [Run(start, width, _times(rows, start, width)) for width in range(1, _WIDEST + 1)]
        best = max((way for way in ways if way.times >= _FEWEST), key=_spared, default=Run(start, 1, 1))
        found.append(best)
        start = best.end
    return found


def _spared(run: Run) -> int:
    """Rows that need not be written."""
    return run.width * (run.times - 1)


def _times(rows: Sequence[Hashable], start: int, width: int) -> int:
    """How often the rows from ``start`` on come, one time after another."""
    end = start + width
    while end < len(rows) and rows[end] == rows[end - width]:
        end += 1
    return (end - start) // width
