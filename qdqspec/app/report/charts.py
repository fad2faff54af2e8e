"""Charts of a case as inline SVG.

Colours come from the page's style sheet by class, so that a chart follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from qdqspec._core.units import db_text, metric_text, ms_text, plain, ratio_text
from qdqspec.app.report.facts import MOST_BLOCKS, day_text, role_text
from qdqspec.app.report.svg import element, frame, part_text, px, text, ticks
from qdqspec.types import (
    EXACT_DB,
    NOT_CANDIDATES,
    FrontPoint,
    GraphPart,
    Interval,
    LatencyEvidence,
    RegressionEvidence,
    SearchResult,
    Trial,
)

WIDTH = 420  # so that text is readable on a page of 400 pixels, which has 350 for a chart
_MOST_POINTS = 150  # of a latency: more would overlap
_MOST_RATIO = 1.05  # of candidates beside the front


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels; a value outside the range is drawn at the end of the axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        return ticks(self.low, self.high)


def _upright(x: float, top: float, bottom: float, label: str = "", style: str = "grid") -> str:
    """A vertical line with its value below it."""
    line = element("line", style, x1=x, x2=x, y1=top, y2=bottom)
    return line + text(x, bottom + 14, label, "tick middle") if label else line


def _level(y: float, left: float, right: float, label: str, style: str = "grid") -> str:
    """A horizontal line with its value at the left."""
    line = element("line", style, x1=left, x2=right, y1=y, y2=y)
    return line + text(left - 8, y + 4, label, "tick end")


def _style_at(value: float) -> str:
    """The CSS class of a grid line; the line of the reference, at 1, has another style."""
    return "grid one" if math.isclose(value, 1) else "grid"


# ---- latency -------------------------------------------------------------------------------------


def latency_chart(latency: LatencyEvidence) -> str:
    """For each role a box over a strip of single runs; the axis starts at zero, so that lengths compare."""
    if not latency.samples:
        return ""
    runs = {role: latency.line(role).run_ms(latency.clock) for role in latency.samples}
    names = {role: (role_text(role, 18), f"{ms_text(latency.median_ms(role))} ms") for role in runs}
    top = max(_quantile(values, 0.97) for values in runs.values()) * 1.06 or 1.0
    height = 50 * len(runs) + 34
    x = _Axis(0, top, 8, WIDTH - 14)
    parts = [_upright(x(tick), 2, height - 26, f"{tick:g}" if tick else "") for tick in x.ticks()]
    parts.append(text(x.start, height - 12, "0 ms", "tick"))
    for row, (role, values) in enumerate(runs.items()):
        name, label = names[role]
        style = "tuned" if role == "tuned" else "other"
        parts.append(f'<g class="{style}">{_distribution(name, label, values, 50 * row + 31, x)}</g>')
    listed = ", ".join(f"{name} {label}" for name, label in names.values())
    return frame(WIDTH, height, f"Latency by model: {listed}", parts)


def _distribution(name: str, label: str, values: Sequence[float], y: float, x: _Axis) -> str:
    low, median, high = (x(_quantile(values, share)) for share in (0.25, 0.5, 0.75))
    thinned = values[:: max(1, math.ceil(len(values) / _MOST_POINTS))]
    dots = [  # moved up and down by a golden-ratio sequence
        element("circle", cx=x(value), cy=y + 9 + 7 * ((index * 0.618034) % 1), r=1.7)
        for index, value in enumerate(thinned)
    ]
    return (
        text(x.start, y - 18, name, "name")
        + element("rect", "bar", x=x.start, y=y - 11, width=median - x.start, height=11)
        + f'<g class="dots">{"".join(dots)}</g>'
        + element("rect", "box", x=low, y=y - 13, width=max(high - low, 2), height=15, rx=2)
        + element("line", "median", x1=median, x2=median, y1=y - 15, y2=y + 4)
        + text(x.end, y - 18, label, "value end")
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- the search ----------------------------------------------------------------------------------


def search_chart(search: SearchResult) -> str:
    """The ratio of each candidate over its number, the best so far as a line, and the reference at 1.

    Empty for fewer than two candidates, and if nothing was timed.
    """
    trials = [trial for trial in search.trials if trial.phase not in NOT_CANDIDATES]
    if len(trials) < 2 or search.coverage is not None:
        return ""
    ratios = [trial.ratio for trial in trials if trial.ok and trial.ratio is not None]
    top = min(max([1.1, *ratios]) * 1.05, 2.0)
    height, last = 214, max(1, *(trial.number for trial in trials))
    x = _Axis(0, last, 46, WIDTH - 16)
    y = _Axis(max(0.0, min([0.9, *ratios]) - 0.08), top, height - 38, 24)
    parts = [text(8, 12, "time over the reference's", "tick")]
    parts += [_level(y(level), x.start, x.end, f"{level:g}", _style_at(level)) for level in y.ticks()]
    numbers = sorted({int(tick) for tick in x.ticks() if tick == int(tick)})
    parts += [_upright(x(number), height - 38, height - 34, str(number)) for number in numbers]
    best = [
        (x(trial.number), y(trial.ratio))
        for trial in trials
        if trial.ok and trial.ratio is not None and trial.incumbent
    ]
    parts += [_steps(best, x.end)] if best else []
    parts += [_candidate(trial, x, y) for trial in trials]
    parts.append(text((x.start + x.end) / 2, height - 4, "candidate", "tick middle"))
    return frame(WIDTH, height, "Search: time of each candidate over the reference's", parts)


def _candidate(trial: Trial, x: _Axis, y: _Axis) -> str:
    name, at = f"candidate {trial.number} ({plain(trial.phase, 20)})", x(trial.number)
    if not trial.ok or trial.ratio is None:
        title = f"{name}: failed. {plain(trial.error or '', 120)}"
        return element("path", "mark failed", title, d=f"M{px(at - 4)} {px(y.end - 4)}l8 8m0 -8l-8 8")
    outcome = "kept" if trial.incumbent else trial.race.verdict if trial.race else "not raced"
    style = "mark kept" if trial.incumbent else "mark dropped"
    title = f"{name}: {ratio_text(trial.ratio)} of reference, {outcome}"
    return element("circle", style, title, cx=at, cy=y(trial.ratio), r=4)


def _steps(points: Sequence[tuple[float, float]], end: float | None = None) -> str:
    """A stepped line: each height holds until the next point, the last one until ``end``."""
    path = [f"{px(points[0][0])},{px(points[0][1])}"]
    for (_, before), (x, y) in pairwise(points):
        path += [f"{px(x)},{px(before)}", f"{px(x)},{px(y)}"]
    if end is not None:
        path.append(f"{px(end)},{px(points[-1][1])}")
    return element("polyline", "best", points=" ".join(path))


# ---- latency against accuracy --------------------------------------------------------------------


def front_chart(search: SearchResult) -> str:
    """Latency against accuracy for a search with both objectives: the task metric that was asked for, else SQNR.

    A line joins the front; better is left and up. Points without any error, such as the reference, are omitted from a
    chart of SQNR: it is infinite. So are candidates that are slower than the reference. Empty if no point is left.
    """
    metric = None if search.accuracy is None else search.accuracy.metric
    title = "SQNR, dB" if metric is None else plain(metric, 24)

    def level(measured: FrontPoint | Trial) -> float | None:
        """The accuracy on the vertical axis; ``None`` if it was not measured or is infinite."""
        if metric is not None:
            return measured.accuracy
        return measured.sqnr_db if measured.sqnr_db is not None and measured.sqnr_db < EXACT_DB else None

    def level_text(value: float) -> str:
        return f"{db_text(value)} dB" if metric is None else f"{title} {metric_text(metric, value)}"

    front = [(point.ratio.median, at, point) for point in search.front if (at := level(point)) is not None]
    front.sort(key=lambda each: (each[0], -each[1]))
    ahead = {point.placement for point in search.front}
    behind = [
        (trial.ratio, at, trial)
        for trial in search.trials
        if trial.ratio is not None and trial.ratio <= _MOST_RATIO and (at := level(trial)) is not None
        if trial.phase not in NOT_CANDIDATES and trial.placement.digest not in ahead
    ]
    if not front:
        return ""
    x, y = _front_axes([(ratio, at) for ratio, at, _ in (*front, *behind)])
    parts = [_level(y(tick), x.start, x.end, f"{tick:g}") for tick in y.ticks()]
    for tick in x.ticks():
        parts.append(_upright(x(tick), 20, y.start, style=_style_at(tick)))
        parts.append(text(x(tick), y.start + 16, f"{tick:g}", "tick middle"))
    parts.append(text((x.start + x.end) / 2, y.start + 34, "time over the reference's", "tick middle"))
    parts.append(text(8, 12, title, "tick"))
    parts.append(_steps([(x(ratio), y(at)) for ratio, at, _ in front]) if len(front) > 1 else "")
    for ratio, at, trial in behind:
        tooltip = f"candidate {trial.number} ({plain(trial.phase, 20)}): {level_text(at)}"
        parts.append(element("circle", "mark dropped", tooltip, cx=x(ratio), cy=y(at), r=4))
    for ratio, at, point in front:
        selected = point.placement == search.winner.digest
        tooltip = f"{point.pairs} pairs: {ratio_text(ratio)} of reference, {level_text(at)}"
        if point.ratio.low < point.ratio.high:
            parts.append(_whisker(point.ratio, x, y(at)))
        style, radius = ("kept", 5.5) if selected else ("front", 4)
        tooltip += ", selected" if selected else ""
        parts.append(element("circle", f"mark {style}", tooltip, cx=x(ratio), cy=y(at), r=radius))
    points = ", ".join(f"{ratio:.3f} at {at:.4g}" for ratio, at, _ in front)
    return frame(WIDTH, 240, f"Time over the reference's against {title}, the front: {points}", parts)


def _front_axes(points: Sequence[tuple[float, float]]) -> tuple[_Axis, _Axis]:
    ratios, levels = [ratio for ratio, _ in points], [level for _, level in points]
    low, high = min(ratios), max([1.0, *ratios])
    wide = (high - low) * 0.08 or 0.05
    span, size = max(levels) - min(levels), max(1.0, *map(abs, levels))
    tall = max(span * 0.12, 1e-4 * size) if span else 0.05 * size
    bottom, top = min(levels) - tall, max(levels) + tall
    if min(levels) >= 0 and max(levels) <= 1:  # shares, as of right answers: no axis beyond them
        bottom, top = max(0.0, bottom), min(1.0, top)
    return _Axis(max(0.0, low - wide), high + wide, 58, WIDTH - 16), _Axis(bottom, top, 200, 28)


def _whisker(ratio: Interval, x: _Axis, y: float) -> str:
    return element("line", "whisker", x1=x(ratio.low), x2=x(ratio.high), y1=y, y2=y)


# ---- layers --------------------------------------------------------------------------------------


def layers_chart(parts: Sequence[GraphPart]) -> str:
    """The time of each part in the reference and in the selected model, the longest first; empty without times."""
    timed = [part for part in parts if part.reference_ms is not None]
    timed.sort(key=lambda part: -max(part.reference_ms or 0.0, part.tuned_ms or 0.0))
    if not timed:
        return ""
    longest = max(timed[0].reference_ms or 0.0, timed[0].tuned_ms or 0.0) or 1.0
    x, y = _Axis(0, longest, 0, WIDTH - 64), 0
    drawn, listed = [], []
    for part in timed[:MOST_BLOCKS]:
        y += 15
        name = plain(part.name, 60)
        shown = name if len(name) <= 56 else f"...{name[-53:]}"
        title = f"{plain(part.name, 80)}: {part_text(part)}"
        drawn.append(f"<g><title>{escape(title)}</title>{text(0, y - 3, shown, 'name')}</g>")
        times = [("other", part.reference_ms), ("tuned", part.tuned_ms)]
        figures = [(style, ms) for style, ms in times if ms is not None]
        for style, ms in figures:
            bar = element("rect", "bar solid", x=0, y=y + 1, width=max(x(ms), 1), height=12)
            drawn.append(f'<g class="{style}">{bar}{text(x(ms) + 6, y + 11, ms_text(ms), "tick")}</g>')
            y += 15
        y += 6
        listed.append(f"{name} {' and '.join(ms_text(ms) for _, ms in figures)}")
    label = f"Milliseconds by part of the model, reference and tuned: {', '.join(listed)}"
    return frame(WIDTH, y + 2, label, drawn)


# ---- baselines -----------------------------------------------------------------------------------


def baseline_chart(found: RegressionEvidence) -> str:
    """The ratios of the baseline, then of this run, then of other devices, one row each; empty for a single row.

    A dashed line is at the figure to compare with. The axis need not begin at 0.
    """
    rows = [(day_text(figure.recorded) or "undated", figure.ratio, "other") for figure in found.history]
    if found.ratio is not None and found.state == "compared":
        rows.append(("this run", found.ratio, "tuned"))
    rows += [(plain(figure.device, 20), figure.ratio, "other") for figure in found.elsewhere]
    if len(rows) < 2:
        return ""
    mark = [found.history[-1].ratio.median] if found.history else []
    x = _ratio_axis([ratio for _, ratio, _ in rows], mark)
    height = 26 * len(rows) + 34
    parts = [_upright(x(tick), 2, height - 26, f"{tick:g}") for tick in x.ticks()]
    parts += [_upright(x(value), 2, height - 26, style="grid one") for value in mark]
    for number, (name, ratio, style) in enumerate(rows):
        y = 26 * number + 15
        parts.append(
            f'<g class="{style}">{text(x.start - 10, y + 4, name, "end name")}{_whisker(ratio, x, y)}'
            f"{element('circle', 'mark', cx=x(ratio.median), cy=y, r=4.5)}"
            f"{text(x.end + 8, y + 4, f'{ratio.median:.3f}', 'value')}</g>"
        )
    listed = ", ".join(f"{name} {ratio.median:.3f}" for name, ratio, _ in rows)
    return frame(WIDTH, height, f"Tuned over reference: {listed}", parts)


def _ratio_axis(ratios: Sequence[Interval], mark: Sequence[float]) -> _Axis:
    """An axis of all bounds."""
    bounds = [bound for ratio in ratios for bound in (ratio.low, ratio.median, ratio.high)]
    finite = [bound for bound in (*bounds, *mark) if math.isfinite(bound)]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 0.05 * high or 1.0
    return _Axis(max(0.0, low - room), high + room, 132, WIDTH - 48)
