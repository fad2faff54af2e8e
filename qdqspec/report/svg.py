"""Small charts as inline SVG: latency distributions, the progress of a search, and shared drawing functions.

Colours come from the page's style sheet by class, so that a chart follows light and dark. All text is escaped
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 420  # so that text is readable on a page of 400 pixels, which has 350 for a chart
_LEFT, _RIGHT = 8, 14
_ROW = 50
_MOST_POINTS = 150  # of one strip: more would overlap


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of a distribution chart: its name, its values, and the label at its end."""

    name: str
    values: tuple[float, ...]
    label: str
    style: str  # CSS class


@dataclass(frozen=True, slots=True)
class Step:
    """One candidate of a search: its number, its ratio to the reference (``None`` if it failed), its result."""

    number: int
    ratio: float | None
    style: str  # CSS class: kept, dropped or failed
    title: str


def distributions(strips: Sequence[Strip], unit: str) -> str:
    """A box over a strip of single runs for each row; the axis starts at zero, so that lengths compare."""
    top = max(_quantile(strip.values, 0.97) for strip in strips) * 1.06 or 1.0
    height = _ROW * len(strips) + 34
    scale = (WIDTH - _LEFT - _RIGHT) / top
    parts = [_axis(top, scale, height, unit)]
    for row, strip in enumerate(strips):
        parts.append(_strip(strip, _ROW * row + 31, scale, top))
    names = ", ".join(f"{strip.name} {strip.label}" for strip in strips)
    return frame(height, f"Latency by model: {names}", parts)


def _strip(strip: Strip, middle: float, scale: float, top: float) -> str:
    low, median, high = (_LEFT + scale * _quantile(strip.values, q) for q in (0.25, 0.5, 0.75))
    dots = "".join(
        f'<circle cx="{px(_LEFT + scale * min(value, top))}" cy="{px(middle + 9 + _jitter(index))}" r="1.7"/>'
        for index, value in enumerate(_thinned(strip.values))
    )
    return (
        f'<g class="{strip.style}">{words(_LEFT, middle - 18, strip.name, "name")}'
        f'<rect class="bar" x="{_LEFT}" y="{px(middle - 11)}" width="{px(median - _LEFT)}" height="11"/>'
        f'<g class="dots">{dots}</g>'
        f'<rect class="box" x="{px(low)}" y="{px(middle - 13)}" width="{px(max(high - low, 2))}" height="15" rx="2"/>'
        f'<line class="median" x1="{px(median)}" x2="{px(median)}" y1="{px(middle - 15)}" y2="{px(middle + 4)}"/>'
        f"{words(WIDTH - _RIGHT, middle - 18, strip.label, 'value end')}</g>"
    )


def _axis(top: float, scale: float, height: int, unit: str) -> str:
    parts = []
    for tick in ticks(0, top):
        x = _LEFT + scale * tick
        parts.append(f'<line class="grid" x1="{px(x)}" x2="{px(x)}" y1="2" y2="{height - 26}"/>')
        parts.append(words(x, height - 12, f"{tick:g}", "tick middle") if tick else "")
    parts.append(words(_LEFT, height - 12, f"0 {unit}", "tick"))
    return "".join(parts)


def convergence(steps: Sequence[Step]) -> str:
    """The ratio of each candidate over its number, the best so far as a line, and the reference at 1."""
    ratios = [step.ratio for step in steps if step.ratio is not None]
    top = min(max([1.1, *ratios]) * 1.05, 2.0)
    bottom = max(0.0, min([0.9, *ratios]) - 0.08)
    height, left, right = 214, 46, 16
    last = max([1, *(step.number for step in steps)])

    def place(step: Step) -> tuple[float, float]:
        shown = top if step.ratio is None else min(step.ratio, top)
        x = left + (WIDTH - left - right) * (step.number / last)
        return x, _level(shown, bottom, top, height)

    parts = [words(8, 12, "time over the reference's", "tick"), _levels(bottom, top, left, height)]
    for number in whole_ticks(last):
        x = left + (WIDTH - left - right) * (number / last)
        parts.append(f'<line class="grid" x1="{px(x)}" x2="{px(x)}" y1="{height - 38}" y2="{height - 34}"/>')
        parts.append(words(x, height - 20, str(number), "tick middle"))
    parts.append(_best_line([(place(step), step.style == "kept") for step in steps], WIDTH - right))
    parts += [_mark(step, *place(step)) for step in steps]
    parts.append(words((left + WIDTH - right) / 2, height - 4, "candidate", "tick middle"))
    return frame(height, "Search: time of each candidate over the reference's", parts)


def _level(ratio: float, bottom: float, top: float, height: int) -> float:
    return 24 + (height - 62) * (top - ratio) / (top - bottom)


def _levels(bottom: float, top: float, left: int, height: int) -> str:
    parts = []
    for level in ticks(bottom, top):
        y = _level(level, bottom, top, height)
        style = "grid one" if math.isclose(level, 1) else "grid"
        parts.append(f'<line class="{style}" x1="{left}" x2="{WIDTH - 16}" y1="{px(y)}" y2="{px(y)}"/>')
        parts.append(words(left - 8, y + 4, f"{level:g}", "tick end"))
    return "".join(parts)


def _best_line(places: Sequence[tuple[tuple[float, float], bool]], right: float) -> str:
    """A step at each candidate that was kept, then a line to the right edge."""
    points: list[str] = []
    y = None
    for (x, at), kept in places:
        if kept:
            points += ([f"{px(x)},{px(y)}"] if y is not None else []) + [f"{px(x)},{px(at)}"]
            y = at
    if y is None:
        return ""
    return f'<polyline class="best" points="{" ".join([*points, f"{px(right)},{px(y)}"])}"/>'


def _mark(step: Step, x: float, y: float) -> str:
    title = f"<title>{escape(step.title)}</title>"
    if step.ratio is None:
        path = f"M{px(x - 4)} {px(y - 4)}l8 8m0 -8l-8 8"
        return f'<path class="mark failed" d="{path}">{title}</path>'
    return f'<circle class="mark {step.style}" cx="{px(x)}" cy="{px(y)}" r="4">{title}</circle>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, three to eight of them; 1 is among them if it is in the range."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return []
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


def whole_ticks(last: int) -> list[int]:
    """Round whole numbers from 0 to ``last``."""
    return sorted({int(tick) for tick in ticks(0, last) if tick == int(tick)})


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _thinned(values: Sequence[float]) -> Sequence[float]:
    stride = max(1, math.ceil(len(values) / _MOST_POINTS))
    return values[::stride]


def _jitter(index: int) -> float:
    """Vertical offset of a dot of a strip, deterministic (golden-ratio sequence)."""
    return 7 * ((index * 0.618034) % 1)


def frame(height: int, label: str, parts: Sequence[str]) -> str:
    """The parts as one picture; ``label`` is its text for screen readers."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def words(x: float, y: float, text: str, style: str) -> str:
    """A text element at a position."""
    return f'<text x="{px(x)}" y="{px(y)}" class="{style}">{escape(text)}</text>'


def px(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
