"""Figures as horizontal bars in inline SVG: one row per name, with one bar or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qdqspec.report.svg import WIDTH, frame, px, words

_LEFT, _RIGHT, _BAR, _GAP, _SHOWN = 212, 64, 16, 6, 30  # characters of a name


@dataclass(frozen=True, slots=True)
class Bar:
    """A name with figures, each with its CSS class and its label, and a title for the pointer."""

    name: str
    figures: tuple[tuple[str, float, str], ...]
    title: str


def bars(rows: Sequence[Bar], what: str) -> str:
    """The rows in their order; the longest bar fills the width."""
    longest = max(value for row in rows for _, value, _ in row.figures) or 1.0
    y, parts = 4.0, []
    for row in rows:
        name = row.name if len(row.name) <= _SHOWN else f"...{row.name[3 - _SHOWN :]}"
        middle = y + _BAR * len(row.figures) / 2 + 5
        parts.append(f"<g><title>{escape(row.title)}</title>{words(_LEFT - 8, middle, name, 'end name')}</g>")
        for style, value, label in row.figures:
            width = (WIDTH - _LEFT - _RIGHT) * value / longest
            parts.append(
                f'<g class="{style}"><rect class="bar solid" x="{_LEFT}" y="{px(y + 2)}" '
                f'width="{px(max(width, 1.0))}" height="13"/>'
                f"{words(_LEFT + width + 6, y + 12, label, 'tick')}</g>"
            )
            y += _BAR
        y += _GAP
    said = ", ".join(f"{row.name} {' and '.join(label for *_, label in row.figures)}" for row in rows)
    return frame(round(y + 2), f"{what}: {said}", parts)
