"""Pictures of a case as inline SVG: charts, and the model as a layered drawing with a box for each part.

Colours come from the page's style sheet by class, so that a picture follows light and dark. All text is escaped here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from qdqspec._core.units import (
    count_text,
    db_text,
    metric_text,
    ms_text,
    plain,
    ratio_text,
    share_text,
)
from qdqspec.app.report.facts import MOST_BLOCKS, day_text, role_text
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
INSTALL = "pip install 'qdqspec[report]'"
STYLES = 4  # of number formats: further ones look like the last
_BOX_WIDTH, _BOX_HEIGHT, _ROW, _COLUMN, _MARGIN = 216, 42, 64, 236, 12  # pixels of the drawing
_TO = " \u2192 "  # from the reference to the selected model

Point = tuple[float, float]


# ---- elements ------------------------------------------------------------------------------------


def element(name: str, style: str = "", title: str = "", **attributes: float | str) -> str:
    """An element with a CSS class, a title for the pointer, and coordinates to a tenth of a pixel."""
    given = {"class": style, **attributes} if style else attributes
    written = "".join(
        f' {key}="{value if isinstance(value, str) else px(value)}"' for key, value in given.items()
    )
    return f"<{name}{written}><title>{escape(title)}</title></{name}>" if title else f"<{name}{written}/>"


def text(x: float, y: float, words: str, style: str) -> str:
    """A text element at a position."""
    return f'<text x="{px(x)}" y="{px(y)}" class="{style}">{escape(words)}</text>'


def frame(width: int, height: int, label: str, parts: Sequence[str], size: str = "") -> str:
    """The parts as one picture; ``label`` is its text for screen readers."""
    return f'<svg viewBox="0 0 {width} {height}"{size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def px(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; a value outside the range is drawn at the end of the axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        """Round numbers of the range, three to eight of them; 1 is among them if it is in the range."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            return []
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * index, 12) for index in range(first, last + 1)]


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
    x = Axis(0, top, 8, WIDTH - 14)
    parts = [_upright(x(tick), 2, height - 26, f"{tick:g}" if tick else "") for tick in x.ticks()]
    parts.append(text(x.start, height - 12, "0 ms", "tick"))
    for row, (role, values) in enumerate(runs.items()):
        name, label = names[role]
        y = 50 * row + 31
        low, median, high = (x(_quantile(values, share)) for share in (0.25, 0.5, 0.75))
        thinned = values[:: max(1, math.ceil(len(values) / 150))]  # more dots would overlap
        dots = [  # moved up and down by a golden-ratio sequence
            element("circle", cx=x(value), cy=y + 9 + 7 * ((index * 0.618034) % 1), r=1.7)
            for index, value in enumerate(thinned)
        ]
        parts += [
            f'<g class="{"tuned" if role == "tuned" else "other"}">',
            text(x.start, y - 18, name, "name"),
            element("rect", "bar", x=x.start, y=y - 11, width=median - x.start, height=11),
            f'<g class="dots">{"".join(dots)}</g>',
            element("rect", "box", x=low, y=y - 13, width=max(high - low, 2), height=15, rx=2),
            element("line", "median", x1=median, x2=median, y1=y - 15, y2=y + 4),
            text(x.end, y - 18, label, "value end"),
            "</g>",
        ]
    listed = ", ".join(f"{name} {label}" for name, label in names.values())
    return frame(WIDTH, height, f"Latency by model: {listed}", parts)


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
    x = Axis(0, last, 46, WIDTH - 16)
    y = Axis(max(0.0, min([0.9, *ratios]) - 0.08), top, height - 38, 24)
    parts = [text(8, 12, "time / reference time", "tick")]
    parts += [_level(y(level), x.start, x.end, f"{level:g}", _style_at(level)) for level in y.ticks()]
    numbers = sorted({int(tick) for tick in x.ticks() if tick == int(tick)})
    parts += [_upright(x(number), height - 38, height - 34, str(number)) for number in numbers]
    best, marks = [], []
    for trial in trials:
        name, at = f"candidate {trial.number} ({plain(trial.phase, 20)})", x(trial.number)
        if not trial.ok or trial.ratio is None:
            title = f"{name}: failed. {plain(trial.error or '', 120)}"
            cross = f"M{px(at - 4)} {px(y.end - 4)}l8 8m0 -8l-8 8"
            marks.append(element("path", "mark failed", title, d=cross))
            continue
        if trial.incumbent:
            best.append((at, y(trial.ratio)))
        outcome = "kept" if trial.incumbent else trial.race.verdict if trial.race else "not raced"
        style = "mark kept" if trial.incumbent else "mark dropped"
        title = f"{name}: {ratio_text(trial.ratio)} of reference, {outcome}"
        marks.append(element("circle", style, title, cx=at, cy=y(trial.ratio), r=4))
    parts += [_steps(best, x.end)] if best else []
    parts += [*marks, text((x.start + x.end) / 2, height - 4, "candidate", "tick middle")]
    return frame(WIDTH, height, "Search: time of each candidate / reference time", parts)


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
        if trial.ratio is not None and trial.ratio <= 1.05 and (at := level(trial)) is not None
        if trial.phase not in NOT_CANDIDATES and trial.placement.digest not in ahead
    ]
    if not front:
        return ""
    x, y = _front_axes([(ratio, at) for ratio, at, _ in (*front, *behind)])
    parts = [_level(y(tick), x.start, x.end, f"{tick:g}") for tick in y.ticks()]
    for tick in x.ticks():
        parts.append(_upright(x(tick), 20, y.start, style=_style_at(tick)))
        parts.append(text(x(tick), y.start + 16, f"{tick:g}", "tick middle"))
    parts.append(text((x.start + x.end) / 2, y.start + 34, "time / reference time", "tick middle"))
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
    return frame(WIDTH, 240, f"Time / reference time against {title}, the front: {points}", parts)


def _front_axes(points: Sequence[tuple[float, float]]) -> tuple[Axis, Axis]:
    ratios, levels = [ratio for ratio, _ in points], [level for _, level in points]
    low, high = min(ratios), max([1.0, *ratios])
    wide = (high - low) * 0.08 or 0.05
    span, size = max(levels) - min(levels), max(1.0, *map(abs, levels))
    tall = max(span * 0.12, 1e-4 * size) if span else 0.05 * size
    bottom, top = min(levels) - tall, max(levels) + tall
    if min(levels) >= 0 and max(levels) <= 1:  # shares, as of right answers: no axis beyond them
        bottom, top = max(0.0, bottom), min(1.0, top)
    return Axis(max(0.0, low - wide), high + wide, 58, WIDTH - 16), Axis(bottom, top, 200, 28)


def _whisker(ratio: Interval, x: Axis, y: float) -> str:
    return element("line", "whisker", x1=x(ratio.low), x2=x(ratio.high), y1=y, y2=y)


# ---- layers --------------------------------------------------------------------------------------


def layers_chart(parts: Sequence[GraphPart]) -> str:
    """The time of each part in the reference and in the selected model, the longest first; empty without times."""
    timed = [part for part in parts if part.reference_ms is not None]
    timed.sort(key=lambda part: -max(part.reference_ms or 0.0, part.tuned_ms or 0.0))
    if not timed:
        return ""
    longest = max(timed[0].reference_ms or 0.0, timed[0].tuned_ms or 0.0) or 1.0
    x, y = Axis(0, longest, 0, WIDTH - 64), 0
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
    rows += [(plain(figure.device, 18), figure.ratio, "other") for figure in found.elsewhere]
    if len(rows) < 2:
        return ""
    mark = [found.history[-1].ratio.median] if found.history else []
    bounds = [*mark, *(bound for _, ratio, _ in rows for bound in (ratio.low, ratio.median, ratio.high))]
    finite = [bound for bound in bounds if math.isfinite(bound)]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 0.05 * high or 1.0
    x = Axis(max(0.0, low - room), high + room, 132, WIDTH - 48)
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


# ---- the model ----------------------------------------------------------------------------------


def model_graph(parts: Sequence[GraphPart]) -> tuple[str, float] | None:
    """The drawing, with its width and height, and the distance of its first part from the left side, in pixels.

    ``None`` if the library of the extra ``report`` is not installed.
    """
    try:
        from graph_layout import SugiyamaLayout
    except ImportError:
        return None
    edges = [(maker, reader) for reader, part in enumerate(parts) for maker in part.inputs if maker != reader]
    layout = SugiyamaLayout(
        nodes=[{} for _ in parts],
        links=[{"source": maker, "target": reader} for maker, reader in edges],
        size=(1e6, 1e6),  # the library would otherwise scale the drawing down
        layer_separation=_ROW,
        node_separation=_COLUMN,
    )
    layout.run(center_graph=False)  # it would move the boxes without the bends of edges
    places = [(float(node.x), float(node.y)) for node in layout.nodes]
    bends = {edge: [(float(x), float(y)) for x, y in points] for edge, points in layout.edge_bends.items()}
    # The library turns edges of a cycle around.
    bends |= {(b, a): points[::-1] for (a, b), points in bends.items() if not bends.get((b, a))}
    every = [*places, *(point for points in bends.values() for point in points)]
    left, top = (min(point[axis] for point in every) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in every) for axis in (0, 1))
    more = (_MARGIN + _BOX_WIDTH / 2 - left, _MARGIN + _BOX_HEIGHT / 2 - top)
    width, height = (
        math.ceil(2 * _MARGIN + span) for span in (right - left + _BOX_WIDTH, bottom - top + _BOX_HEIGHT)
    )

    def moved(point: Point) -> Point:
        return point[0] + more[0], point[1] + more[1]

    powers = [None if part.sqnr_db is None else 10 ** (-part.sqnr_db / 10) for part in parts]
    whole = math.fsum(power for power in powers if power is not None) or 1.0
    styles = style_of(parts)
    longest = max((part.reference_ms or 0.0 for part in parts), default=0.0)
    drawn = [
        _edge(moved(places[a]), [moved(p) for p in bends.get((a, b), [])], moved(places[b])) for a, b in edges
    ]
    drawn += [
        _box(part, moved(place), styles, None if power is None else power / whole, longest)
        for part, place, power in zip(parts, places, powers, strict=True)
    ]
    label = f"The model in {count_text(len(parts), 'part')}, from its inputs at the top to its outputs"
    svg = frame(width, height, label, drawn, f' width="{width}" height="{height}"')
    return svg, moved(places[0])[0] - _BOX_WIDTH / 2


def style_of(parts: Sequence[GraphPart]) -> dict[str, str]:
    """The CSS class of each number format of the model, the most frequent one first."""
    found = Counter[str]()
    for part in parts:
        found.update(part.formats)
    ordered = sorted(found, key=lambda name: (-found[name], name))
    return {name: f"f{min(number, STYLES - 1)}" for number, name in enumerate(ordered)}


def part_text(part: GraphPart) -> str:
    """``Conv + Relu``, or ``9 nodes: 4 Conv, 4 Relu, Add``."""
    nodes = sum(part.ops.values())
    if nodes <= 3:
        return " + ".join(plain(op) for op, times in part.ops.items() for _ in range(times))
    often = sorted(part.ops.items(), key=lambda item: -item[1])
    return f"{nodes} nodes: {', '.join(f'{times} {plain(op)}' if times > 1 else plain(op) for op, times in often)}"


def _edge(start: Point, between: Sequence[Point], end: Point) -> str:
    down = 1 if end[1] >= start[1] else -1
    points = [
        (start[0], start[1] + down * _BOX_HEIGHT / 2),
        *between,
        (end[0], end[1] - down * _BOX_HEIGHT / 2),
    ]
    x, y = points[0]
    path = [f"M{px(x)} {px(y)}"]
    for to_x, to_y in points[1:]:
        middle = px((y + to_y) / 2)
        path.append(f"C{px(x)} {middle} {px(to_x)} {middle} {px(to_x)} {px(to_y)}")
        x, y = to_x, to_y
    return f'<path class="edge" d="{"".join(path)}"/>'


def _box(
    part: GraphPart, place: Point, styles: Mapping[str, str], share: float | None, longest: float
) -> str:
    """The box of a part with its formats, times and ``share`` of the error, and all of it as a title."""
    x, y = place[0] - _BOX_WIDTH / 2, place[1] - _BOX_HEIGHT / 2
    nodes, words = sum(part.ops.values()), part_text(part)
    lines = [f"{plain(part.name, 80)}: {words}"]
    if part.reference_ms is not None:
        tuned = "" if part.tuned_ms is None else f", tuned {ms_text(part.tuned_ms)} ms"
        lines.append(f"reference {ms_text(part.reference_ms)} ms{tuned}")
    formats = [f"{count_text(count, 'node')} in {plain(name)}" for name, count in part.formats.items()]
    lines += [", ".join(formats)] if formats else []
    if share is not None and part.sqnr_db is not None:
        lines.append(
            f"quantized alone {db_text(part.sqnr_db)} dB, {share_text(share)} of the error of all blocks"
        )
    title = "\n".join(lines)
    parts = [
        f"<title>{escape(title)}</title>",
        element("rect", "node", x=x, y=y, width=_BOX_WIDTH, height=_BOX_HEIGHT),
    ]
    done = 0.0
    for name, count in part.formats.items():  # as wide as its share of the nodes
        width = _BOX_WIDTH * count / nodes
        parts.append(element("rect", styles[name], x=x + done, y=y, width=width, height=_BOX_HEIGHT))
        done += width
    if longest and part.reference_ms:
        width = _BOX_WIDTH * part.reference_ms / longest
        parts.append(element("rect", "spent", x=x, y=y + _BOX_HEIGHT - 4, width=width, height=4))
    if len(words) > 27:  # characters that fit: cut at a comma
        start, comma, _ = words[:28].rpartition(",")
        words = f"{start if comma else words[:26]}\u2026"
    parts.append(text(x + 8, y + 17, words, "op"))
    times = [ms for ms in (part.reference_ms, part.tuned_ms) if ms is not None]
    if any(times):
        parts.append(text(x + 8, y + 32, f"{_TO.join(map(ms_text, times))} ms", "tick"))
    if share is not None and share >= 0.01:
        parts.append(text(x + _BOX_WIDTH - 8, y + 32, f"error {share_text(share)}", "tick end"))
    return f"<g>{''.join(parts)}</g>"
