"""Charts of a case as inline SVG: bars, a forest plot of ratios, and a Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qdqspec.report.baselines import day_text
from qdqspec.report.facts import MOST_BLOCKS, ROLES, block_errors
from qdqspec.report.svg import WIDTH, Step, Strip, convergence, distributions, frame, px, ticks, words
from qdqspec.report.svg_graph import part_text
from qdqspec.types import (
    EXACT_DB,
    NOT_CANDIDATES,
    BaselineFigure,
    FrontPoint,
    GraphPart,
    Interval,
    LatencyEvidence,
    RegressionEvidence,
    SearchResult,
    Trial,
)
from qdqspec.units import db_text, metric_text, ms_text, plain, ratio_text, share_text


def latency_chart(latency: LatencyEvidence) -> str:
    """The samples of each role on the gating clock; empty without samples."""
    strips = [
        Strip(
            ROLES.get(role, plain(role, 18)),
            latency.line(role).run_ms(latency.clock),
            f"{ms_text(latency.median_ms(role))} ms",
            "tuned" if role == "tuned" else "other",
        )
        for role in latency.samples
    ]
    return distributions(strips, "ms") if strips else ""


def search_chart(search: SearchResult) -> str:
    """Each candidate in the order it was built; empty for fewer than two candidates."""
    steps = [_step(trial) for trial in search.trials if trial.phase not in NOT_CANDIDATES]
    return convergence(steps) if len(steps) > 1 else ""


def _step(trial: Trial) -> Step:
    name = f"candidate {trial.number} ({plain(trial.phase, 20)})"
    if not trial.ok or trial.ratio is None:
        return Step(trial.number, None, "failed", f"{name}: failed. {plain(trial.error or '', 120)}")
    fate = "kept" if trial.incumbent else trial.race.verdict if trial.race else "not raced"
    style = "kept" if trial.incumbent else "dropped"
    return Step(trial.number, trial.ratio, style, f"{name}: {ratio_text(trial.ratio)} of reference, {fate}")


_MOST_RATIO = 1.05  # of candidates beside the front


def front_chart(search: SearchResult) -> str:
    """Latency against accuracy for a search with both objectives: the task metric that was asked for, else SQNR.

    Points without any error, such as the reference, are omitted from a chart of SQNR: it is infinite. So are
    candidates that are slower than the reference. Empty if no point is left.
    """
    metric = None if search.accuracy is None else search.accuracy.metric
    points = [(point, level) for point in search.front if (level := _level(point, metric)) is not None]
    if not points:
        return ""
    ahead = {point.placement for point in search.front}
    behind = [
        Spot(trial.ratio, trial.ratio, trial.ratio, level, "dropped", _trial_title(trial, level, metric))
        for trial in search.trials
        if trial.ratio is not None
        and trial.ratio <= _MOST_RATIO
        and (level := _level(trial, metric)) is not None
        and trial.phase not in NOT_CANDIDATES
        and trial.placement.digest not in ahead
    ]
    spots = [_point(point, level, metric, search.winner.digest) for point, level in points]
    return front([*behind, *spots], "SQNR, dB" if metric is None else plain(metric, 24))


def _level(measured: FrontPoint | Trial, metric: str | None) -> float | None:
    """The accuracy on the vertical axis; ``None`` if it was not measured or is infinite."""
    if metric is not None:
        return measured.accuracy
    return measured.sqnr_db if measured.sqnr_db is not None and measured.sqnr_db < EXACT_DB else None


def _level_text(level: float, metric: str | None) -> str:
    return f"{db_text(level)} dB" if metric is None else f"{plain(metric, 24)} {metric_text(metric, level)}"


def errors_chart(search: SearchResult) -> str:
    """The share of the error that each block makes, largest first; empty if blocks were not rehearsed."""
    rows = [
        Bar(block, (("tuned", share, share_text(share)),), f"{block}: {labels}")
        for block, labels, _, share in block_errors(search)[:MOST_BLOCKS]
    ]
    return bars(rows, "Share of the error by block") if len(rows) > 1 else ""


def layers_chart(parts: Sequence[GraphPart]) -> str:
    """The time of each part in the reference and in the selected model, the longest first; empty without times."""
    timed = [part for part in parts if part.reference_ms is not None]
    timed.sort(key=lambda part: -max(part.reference_ms or 0.0, part.tuned_ms or 0.0))
    rows = []
    for part in timed[:MOST_BLOCKS]:
        times = (("other", part.reference_ms), ("tuned", part.tuned_ms))
        figures = tuple((style, ms, ms_text(ms)) for style, ms in times if ms is not None)
        rows.append(Bar(plain(part.name, 60), figures, f"{plain(part.name, 80)}: {part_text(part)}"))
    return bars(rows, "Milliseconds by part of the model, reference and tuned") if rows else ""


def _trial_title(trial: Trial, level: float, metric: str | None) -> str:
    return f"candidate {trial.number} ({plain(trial.phase, 20)}): {_level_text(level, metric)}"


def _point(point: FrontPoint, level: float, metric: str | None, winner: str) -> Spot:
    shipped = point.placement == winner
    said = _level_text(level, metric)
    title = f"{point.pairs} pairs: {ratio_text(point.ratio.median)} of reference, {said}"
    return Spot(
        point.ratio.median,
        point.ratio.low,
        point.ratio.high,
        level,
        "kept" if shipped else "front",
        f"{title}{', selected' if shipped else ''}",
    )


def baseline_chart(found: RegressionEvidence) -> str:
    """This run's ratio below those of its baseline, and those of other devices; empty for a single row."""
    rows = [_figure(figure, day_text(figure.recorded) or "undated") for figure in found.history]
    if found.ratio is not None and found.state == "compared":
        rows.append(_row("this run", found.ratio, "tuned"))
    rows += [_figure(figure, plain(figure.device, 20)) for figure in found.elsewhere]
    mark = found.history[-1].ratio.median if found.history else None
    return forest(rows, mark, "Tuned over reference") if len(rows) > 1 else ""


def _figure(figure: BaselineFigure, name: str) -> ForestRow:
    return _row(name, figure.ratio, "other")


def _row(name: str, ratio: Interval, style: str) -> ForestRow:
    return ForestRow(name, ratio.median, ratio.low, ratio.high, f"{ratio.median:.3f}", style)


_RIGHT, _BAR, _NAME, _GAP, _SHOWN = 64, 15, 15, 6, 56  # characters of a name


@dataclass(frozen=True, slots=True)
class Bar:
    """A name with figures, each with its CSS class and its label, and a title for the pointer."""

    name: str
    figures: tuple[tuple[str, float, str], ...]
    title: str


def bars(rows: Sequence[Bar], what: str) -> str:
    """The rows in their order; the longest bar fills the width."""
    longest = max(value for row in rows for _, value, _ in row.figures) or 1.0
    y, parts = 0.0, []
    for row in rows:
        name = row.name if len(row.name) <= _SHOWN else f"...{row.name[3 - _SHOWN :]}"
        y += _NAME
        parts.append(f"<g><title>{escape(row.title)}</title>{words(0, y - 3, name, 'name')}</g>")
        for style, value, label in row.figures:
            width = (WIDTH - _RIGHT) * value / longest
            parts.append(
                f'<g class="{style}"><rect class="bar solid" x="0" y="{px(y + 1)}" '
                f'width="{px(max(width, 1.0))}" height="12"/>'
                f"{words(width + 6, y + 11, label, 'tick')}</g>"
            )
            y += _BAR
        y += _GAP
    said = ", ".join(f"{row.name} {' and '.join(label for *_, label in row.figures)}" for row in rows)
    return frame(round(y + 2), f"{what}: {said}", parts)


_FOREST_LEFT, _FOREST_RIGHT, _ROW, _FOOT = 132, 48, 26, 34


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
        return _FOREST_LEFT + (WIDTH - _FOREST_LEFT - _FOREST_RIGHT) * share

    parts = []
    for tick in ticks(left, right):
        parts.append(_upright(x(tick), height, "grid"))
        parts.append(words(x(tick), height - 12, f"{tick:g}", "tick middle"))
    parts += [_upright(x(mark), height, "grid one")] if mark is not None else []
    for number, row in enumerate(rows):
        y = _ROW * number + _ROW / 2 + 2
        low, middle, high = px(x(row.low)), px(x(row.median)), px(x(row.high))
        parts.append(
            f'<g class="{row.style}">{words(_FOREST_LEFT - 10, y + 4, row.name, "end name")}'
            f'<line class="whisker" x1="{low}" x2="{high}" y1="{px(y)}" y2="{px(y)}"/>'
            f'<circle class="mark" cx="{middle}" cy="{px(y)}" r="4.5"/>'
            f"{words(WIDTH - _FOREST_RIGHT + 8, y + 4, row.label, 'value')}</g>"
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


_HEIGHT, _FRONT_LEFT, _FRONT_RIGHT, _TOP, _BOTTOM = 240, 58, 16, 28, 40


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
        bottom, top = min(levels) - tall, max(levels) + tall
        if min(levels) >= 0 and max(levels) <= 1:  # shares, as of right answers: no axis beyond them
            bottom, top = max(0.0, bottom), min(1.0, top)
        return cls(max(0.0, low - wide), high + wide, bottom, top)

    def x(self, ratio: float) -> float:
        share = (min(max(ratio, self.left), self.right) - self.left) / (self.right - self.left)
        return _FRONT_LEFT + (WIDTH - _FRONT_LEFT - _FRONT_RIGHT) * share

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
        parts += _front_level(plane.y(level), f"{level:g}")
    for tick in ticks(plane.left, plane.right):
        x, style = plane.x(tick), "grid one" if math.isclose(tick, 1) else "grid"
        parts.append(f'<line class="{style}" x1="{px(x)}" x2="{px(x)}" y1="20" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(words(x, _HEIGHT - _BOTTOM + 16, f"{tick:g}", "tick middle"))
    middle = (_FRONT_LEFT + WIDTH - _FRONT_RIGHT) / 2
    parts.append(words(middle, _HEIGHT - 6, "time over the reference's", "tick middle"))
    parts.append(words(8, 12, accuracy, "tick"))
    return parts


def _front_level(y: float, text: str) -> list[str]:
    line = f'<line class="grid" x1="{_FRONT_LEFT}" x2="{WIDTH - _FRONT_RIGHT}" y1="{px(y)}" y2="{px(y)}"/>'
    return [line, words(_FRONT_LEFT - 8, y + 4, text, "tick end")]


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
