"""Shares as horizontal bars in inline SVG: one row per name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qdqspec.report.svg import WIDTH, frame, px, words

_LEFT, _RIGHT, _ROW, _SHOWN = 212, 64, 22, 30  # characters of a name


@dataclass(frozen=True, slots=True)
class Bar:
    """A name, its share of the whole, the label at the end, and a title for the pointer."""

    name: str
    share: float
    label: str
    title: str


def bars(rows: Sequence[Bar], what: str) -> str:
    """The rows in their order; the longest bar fills the width."""
    longest = max(row.share for row in rows) or 1.0
    height = _ROW * len(rows) + 8
    parts = []
    for number, row in enumerate(rows):
        y = _ROW * number + 4
        width = (WIDTH - _LEFT - _RIGHT) * row.share / longest
        name = row.name if len(row.name) <= _SHOWN else f"...{row.name[3 - _SHOWN :]}"
        parts.append(
            f'<g class="tuned"><title>{escape(row.title)}</title>{words(_LEFT - 8, y + 13, name, "end name")}'
            f'<rect class="bar solid" x="{_LEFT}" y="{px(y + 3)}" width="{px(max(width, 1.0))}" height="13"/>'
            f"{words(_LEFT + width + 6, y + 13, row.label, 'tick')}</g>"
        )
    said = ", ".join(f"{row.name} {row.label}" for row in rows)
    return frame(height, f"{what}: {said}", parts)
