"""A forest plot as inline SVG: one interval per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qdqspec.report.svg import WIDTH, frame, px, ticks, words

_LEFT, _RIGHT, _ROW, _FOOT = 148, 78, 26, 34


@dataclass(frozen=True, slots=True)
class ForestRow:
    """A name, an estimate with its bounds, and a label at the end. ``style`` is a CSS class."""

    name: str
    median: float
    low: float
    high: float
    label: str
    style: str  # tuned for this run, other for the rest


def forest(rows: Sequence[ForestRow], mark: float | None, what: str) -> str:
    """One line per row; a dashed line at ``mark``, the value to compare with. The axis need not begin at 0."""
    left, right = _span(rows, mark)
    height = _ROW * len(rows) + _FOOT

    def x(value: float) -> float:
        share = (min(max(value, left), right) - left) / (right - left)
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * share

    parts = []
    for tick in ticks(left, right):
        parts.append(_upright(x(tick), height, "grid"))
        parts.append(words(x(tick), height - 12, f"{tick:g}", "tick middle"))
    parts += [_upright(x(mark), height, "grid one")] if mark is not None else []
    for number, row in enumerate(rows):
        y = _ROW * number + _ROW / 2 + 2
        low, middle, high = px(x(row.low)), px(x(row.median)), px(x(row.high))
        parts.append(
            f'<g class="{row.style}">{words(_LEFT - 10, y + 4, row.name, "end name")}'
            f'<line class="whisker" x1="{low}" x2="{high}" y1="{px(y)}" y2="{px(y)}"/>'
            f'<circle class="mark" cx="{middle}" cy="{px(y)}" r="4.5"/>'
            f"{words(WIDTH - _RIGHT + 8, y + 4, row.label, 'value')}</g>"
        )
    said = ", ".join(f"{row.name} {row.label}" for row in rows)
    return frame(height, f"{what}: {said}", parts)


def _span(rows: Sequence[ForestRow], mark: float | None) -> tuple[float, float]:
    """Range of the axis: all bounds, but very wide intervals are cut near the estimates."""
    middles = [row.median for row in rows] + ([] if mark is None else [mark])
    reach = 2 * (max(middles) - min(middles)) + 0.05 * max(middles)
    bounds = [bound for row in rows for bound in (row.low, row.high) if math.isfinite(bound)]
    low = max(0.0, min(middles) - reach, min([*middles, *bounds]))
    high = min(max(middles) + reach, max([*middles, *bounds]))
    room = 0.06 * (high - low) or 0.05 * high or 1.0
    return max(0.0, low - room), high + room


def _upright(x: float, height: int, style: str) -> str:
    return f'<line class="{style}" x1="{px(x)}" x2="{px(x)}" y1="2" y2="{height - 26}"/>'
