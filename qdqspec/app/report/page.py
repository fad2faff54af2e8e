"""Pages within a maximum size: the largest tables are omitted first, then the last cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from qdqspec._core.units import count_text
from qdqspec.app.report.tables import Table


@dataclass(frozen=True, slots=True)
class PageBlock:
    """A piece of a case. ``brief`` replaces it if the page is too long; without one it is kept."""

    text: str
    brief: str = ""


def rows_left_out(table: Table) -> str:
    """The text in place of a table that makes a page too long."""
    rows = count_text(len(table.rows), "row")
    return f"{table.title}: {rows} left out, the page would be too long. The JSON report has them."


def cases_left_out(cases: int) -> str:
    """The text in place of the last cases of a page that is too long."""
    return f"{count_text(cases, 'more case')} left out: the page would be too long. The JSON report has all."


def fit_page(
    head: Sequence[str],
    cases: Sequence[Sequence[PageBlock]],
    tail: Sequence[str],
    limit_bytes: int,
    note: Callable[[int], str],
) -> list[str]:
    """The texts of a page within the limit; ``note(n)`` reports ``n`` omitted cases."""
    blocks = [block for case in cases for block in case]
    excess = sum(map(_size, [*head, *(block.text for block in blocks), *tail])) - limit_bytes
    threshold = math.inf  # the size from which blocks are replaced
    for block in sorted((b for b in blocks if b.brief), key=lambda b: _size(b.text), reverse=True):
        if excess <= 0:
            break
        threshold = _size(block.text)
        excess -= threshold - _size(block.brief)
    texts = [[b.brief if b.brief and _size(b.text) >= threshold else b.text for b in case] for case in cases]
    room = limit_bytes - sum(map(_size, [*head, *tail, note(len(cases))]))
    kept = 0
    while kept < len(cases) and (room := room - sum(map(_size, texts[kept]))) >= 0:
        kept += 1
    left = [note(len(cases) - kept)] if kept < len(cases) else []
    return [*head, *chain.from_iterable(texts[:kept]), *left, *tail]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + 2  # the blank line after it
