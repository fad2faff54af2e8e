"""Shortens a page to a maximum size: omits the largest tables first, then the last cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_ROWS = 500  # of the summary table


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
