"""Common parts of pages: the blocks of a case, and the reduction of a page to a maximum size.

The largest tables are omitted first, then the last cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdqspec.report import facts
from qdqspec.report.baselines import baseline_tables
from qdqspec.types import Evidence
from qdqspec.units import count_text


@dataclass(frozen=True, slots=True)
class PageBlock:
    """A piece of a page. ``brief`` replaces it if the page is too long; without one it is kept."""

    text: str
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The head, one sequence of blocks per case, and the tail."""

    head: Sequence[PageBlock]
    cases: Sequence[Sequence[PageBlock]]
    tail: Sequence[PageBlock] = ()


def case_tables(found: Evidence) -> list[facts.Table]:
    """The tables of a case that have content, in their order on a page."""
    makers = (
        facts.latency_table,
        facts.parity_table,
        facts.ops_table,
        facts.accuracy_table,
        facts.figures_table,
        facts.corrections_table,
        facts.front_table,
        facts.errors_table,
    )
    return [*(table for make in makers if (table := make(found)) is not None), *baseline_tables(found)]


def rows_left_out(table: facts.Table) -> str:
    """The text in place of a table that makes a page too long."""
    rows = count_text(len(table.rows), "row")
    return f"{table.title}: {rows} left out, the page would be too long. The JSON report has them."


def cases_left_out(cases: int) -> str:
    """The text in place of the last cases of a page that is too long."""
    return f"{count_text(cases, 'more case')} left out: the page would be too long. The JSON report has all."


def fitted(page: Page, limit_bytes: int, note: Callable[[int], str]) -> list[str]:
    """The texts of the blocks within the limit; ``note(n)`` reports ``n`` omitted cases."""
    gains = [
        (_size(block.text), _size(block.text) - _size(block.brief))
        for case in page.cases
        for block in case
        if block.brief
    ]
    whole = _total(page.head) + _total(page.tail) + sum(_total(case) for case in page.cases)
    threshold = _threshold(gains, whole - limit_bytes)
    cases = [[_shorter(block, threshold) for block in case] for case in page.cases]
    room = limit_bytes - _total(page.head) - _total(page.tail) - _size(note(len(cases)))
    kept = 0
    while kept < len(cases) and (room := room - sum(_size(text) for text in cases[kept])) >= 0:
        kept += 1
    left = [note(len(cases) - kept)] if kept < len(cases) else []
    return [
        *(block.text for block in page.head),
        *(text for case in cases[:kept] for text in case),
        *left,
        *(block.text for block in page.tail),
    ]


def _threshold(gains: list[tuple[int, int]], excess: int) -> float:
    """The size from which blocks are shortened, so that at least ``excess`` bytes are saved if possible."""
    threshold = math.inf
    for size, gain in sorted(gains, reverse=True):
        if excess <= 0:
            break
        excess -= gain
        threshold = size
    return threshold


def _shorter(block: PageBlock, threshold: float) -> str:
    return block.brief if block.brief and _size(block.text) >= threshold else block.text


def _total(blocks: Sequence[PageBlock]) -> int:
    return sum(_size(block.text) for block in blocks)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + 2  # the blank line after it
