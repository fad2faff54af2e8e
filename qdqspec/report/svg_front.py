"""Latency against accuracy as inline SVG: the Pareto front and the dominated candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qdqspec.report.svg import WIDTH, frame, px, ticks, words

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 240, 58, 16, 28, 40


@dataclass(frozen=True, slots=True)
class Spot:
    """A candidate: its time over the reference's with bounds, and its accuracy: SQNR in dB, or a task metric.

    ``style`` is a CSS class: ``kept`` for the selected one, ``front`` for others on the front, ``dropped``
    for the rest.
    """

    ratio: float
    low: float
    high: float
    level: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class _Plane:
    """Maps ratios and decibels to pixels."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(cls, spots: Sequence[Spot]) -> _Plane:
        levels = [spot.level for spot in spots]
        low, high = min(spot.ratio for spot in spots), max([1.0, *(spot.ratio for spot in spots)])
        wide = (high - low) * 0.08 or 0.05
        span, size = max(levels) - min(levels), max(1.0, *map(abs, levels))
        tall = max(span * 0.12, 1e-4 * size) if span else 0.05 * size
        return cls(max(0.0, low - wide), high + wide, min(levels) - tall, max(levels) + tall)

    def x(self, ratio: float) -> float:
        share = (min(max(ratio, self.left), self.right) - self.left) / (self.right - self.left)
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * share

    def y(self, level: float) -> float:
        return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (self.top - level) / (self.top - self.bottom)


def front(spots: Sequence[Spot], accuracy: str) -> str:
    """Each candidate by time and ``accuracy``; a line joins the front. Better is left and up."""
    plane = _Plane.around(spots)
    ahead = sorted((s for s in spots if s.style != "dropped"), key=lambda s: (s.ratio, -s.level))
    parts = [*_grid(plane, accuracy), _line(ahead, plane)]
    parts += [_spot(spot, plane) for spot in (*(s for s in spots if s.style == "dropped"), *ahead)]
    said = ", ".join(f"{spot.ratio:.3f} at {spot.level:.4g}" for spot in ahead)
    return frame(_HEIGHT, f"Time over the reference's against {accuracy}, the front: {said}", parts)


def _grid(plane: _Plane, accuracy: str) -> list[str]:
    parts = []
    for level in ticks(plane.bottom, plane.top):
        parts += _level(plane.y(level), f"{level:g}")
    for tick in ticks(plane.left, plane.right):
        x, style = plane.x(tick), "grid one" if math.isclose(tick, 1) else "grid"
        parts.append(f'<line class="{style}" x1="{px(x)}" x2="{px(x)}" y1="20" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(words(x, _HEIGHT - _BOTTOM + 16, f"{tick:g}", "tick middle"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(words(middle, _HEIGHT - 6, "time over the reference's", "tick middle"))
    parts.append(words(8, 12, accuracy, "tick"))
    return parts


def _level(y: float, text: str) -> list[str]:
    line = f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{px(y)}" y2="{px(y)}"/>'
    return [line, words(_LEFT - 8, y + 4, text, "tick end")]


def _line(ahead: Sequence[Spot], plane: _Plane) -> str:
    """A stepped line: nothing was found between two points of the front."""
    points: list[str] = []
    for spot in ahead:
        x, y = px(plane.x(spot.ratio)), px(plane.y(spot.level))
        points += [f"{x},{points[-1].partition(',')[2]}"] if points else []
        points.append(f"{x},{y}")
    return f'<polyline class="best" points="{" ".join(points)}"/>' if len(ahead) > 1 else ""


def _spot(spot: Spot, plane: _Plane) -> str:
    x, y = plane.x(spot.ratio), px(plane.y(spot.level))
    bar = ""
    if spot.low < spot.high and spot.style != "dropped":
        low, high = px(plane.x(spot.low)), px(plane.x(spot.high))
        bar = f'<line class="whisker" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>'
    radius = 5.5 if spot.style == "kept" else 4
    title = f"<title>{escape(spot.title)}</title>"
    return f'{bar}<circle class="mark {spot.style}" cx="{px(x)}" cy="{y}" r="{radius:g}">{title}</circle>'
