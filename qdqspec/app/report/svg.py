"""Inline SVG: elements, and the model as a layered drawing: a box for each part, by format, with its time and error.

All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from qdqspec._core.units import count_text, db_text, ms_text, plain, share_text
from qdqspec.types import GraphPart

INSTALL = "pip install 'qdqspec[report]'"
STYLES = 4  # of number formats: further ones look like the last
_WIDTH, _HEIGHT, _ROW, _COLUMN, _MARGIN = 216, 42, 64, 236, 12  # pixels
_LONGEST = 27  # characters of a first line
_LEAST_ERROR = 0.01  # share of the error from which a box shows it
_TO = " \u2192 "  # from the reference to the selected model
_UNBOUNDED = 1e6  # the library would otherwise scale the drawing down

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


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, three to eight of them; 1 is among them if it is in the range."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return []
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


# ---- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture of a model; ``start`` is the distance of its first part from the left side, in pixels."""

    svg: str
    start: float


def model_graph(parts: Sequence[GraphPart]) -> Drawing | None:
    """The drawing, with its width and height; ``None`` if the library of the extra ``report`` is not installed."""
    try:
        from graph_layout import SugiyamaLayout
    except ImportError:
        return None
    edges = [(maker, reader) for reader, part in enumerate(parts) for maker in part.inputs if maker != reader]
    layout = SugiyamaLayout(
        nodes=[{} for _ in parts],
        links=[{"source": maker, "target": reader} for maker, reader in edges],
        size=(_UNBOUNDED, _UNBOUNDED),
        layer_separation=_ROW,
        node_separation=_COLUMN,
    )
    layout.run(center_graph=False)  # it would move the boxes without the bends of edges
    places = [(float(node.x), float(node.y)) for node in layout.nodes]
    bends = {edge: [(float(x), float(y)) for x, y in points] for edge, points in layout.edge_bends.items()}
    every = [*places, *(point for points in bends.values() for point in points)]
    left, top = (min(point[axis] for point in every) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in every) for axis in (0, 1))
    more = (_MARGIN + _WIDTH / 2 - left, _MARGIN + _HEIGHT / 2 - top)
    width, height = (
        math.ceil(2 * _MARGIN + span) for span in (right - left + _WIDTH, bottom - top + _HEIGHT)
    )

    def moved(point: Point) -> Point:
        return point[0] + more[0], point[1] + more[1]

    styles, shares = style_of(parts), _error_shares(parts)
    longest = max((part.reference_ms or 0.0 for part in parts), default=0.0)
    drawn = [
        _edge(moved(places[a]), [moved(p) for p in _between(bends, a, b)], moved(places[b])) for a, b in edges
    ]
    drawn += [
        _box(part, moved(place), styles, share, longest)
        for part, place, share in zip(parts, places, shares, strict=True)
    ]
    label = f"The model in {count_text(len(parts), 'part')}, from its inputs at the top to its outputs"
    svg = frame(width, height, label, drawn, f' width="{width}" height="{height}"')
    return Drawing(svg, moved(places[0])[0] - _WIDTH / 2)


def style_of(parts: Sequence[GraphPart]) -> dict[str, str]:
    """The CSS class of each number format of the model, the most frequent one first."""
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.formats.items():
            found[name] = found.get(name, 0) + count
    ordered = sorted(found, key=lambda name: (-found[name], name))
    return {name: f"f{min(number, STYLES - 1)}" for number, name in enumerate(ordered)}


def part_text(part: GraphPart) -> str:
    """``Conv + Relu``, or ``9 nodes: 4 Conv, 4 Relu, Add``."""
    nodes = sum(part.ops.values())
    if nodes <= 3:
        return " + ".join(plain(op) for op, times in part.ops.items() for _ in range(times))
    often = sorted(part.ops.items(), key=lambda item: -item[1])
    return f"{nodes} nodes: {', '.join(f'{times} {plain(op)}' if times > 1 else plain(op) for op, times in often)}"


def _error_shares(parts: Sequence[GraphPart]) -> list[float | None]:
    powers = [None if part.sqnr_db is None else 10 ** (-part.sqnr_db / 10) for part in parts]
    whole = math.fsum(power for power in powers if power is not None) or 1.0
    return [None if power is None else power / whole for power in powers]


def _between(bends: Mapping[tuple[int, int], list[Point]], maker: int, reader: int) -> list[Point]:
    """The bends of an edge; the library turns edges of a cycle around."""
    return bends.get((maker, reader)) or bends.get((reader, maker), [])[::-1]


def _edge(start: Point, between: Sequence[Point], end: Point) -> str:
    down = 1 if end[1] >= start[1] else -1
    points = [(start[0], start[1] + down * _HEIGHT / 2), *between, (end[0], end[1] - down * _HEIGHT / 2)]
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
    x, y = place[0] - _WIDTH / 2, place[1] - _HEIGHT / 2
    nodes = sum(part.ops.values())
    parts = [
        f"<title>{escape(_title(part, share))}</title>",
        element("rect", "node", x=x, y=y, width=_WIDTH, height=_HEIGHT),
    ]
    done = 0.0
    for name, count in part.formats.items():  # as wide as its share of the nodes
        width = _WIDTH * count / nodes
        parts.append(element("rect", styles[name], x=x + done, y=y, width=width, height=_HEIGHT))
        done += width
    if longest and part.reference_ms:
        width = _WIDTH * part.reference_ms / longest
        parts.append(element("rect", "spent", x=x, y=y + _HEIGHT - 4, width=width, height=4))
    parts.append(text(x + 8, y + 17, _cut(part_text(part)), "op"))
    times = [ms for ms in (part.reference_ms, part.tuned_ms) if ms is not None]
    if any(times):
        parts.append(text(x + 8, y + 32, f"{_TO.join(map(ms_text, times))} ms", "tick"))
    if share is not None and share >= _LEAST_ERROR:
        parts.append(text(x + _WIDTH - 8, y + 32, f"error {share_text(share)}", "tick end"))
    return f"<g>{''.join(parts)}</g>"


def _cut(text: str) -> str:
    """The text, if it is too long cut at a comma."""
    if len(text) <= _LONGEST:
        return text
    start, comma, _ = text[: _LONGEST + 1].rpartition(",")
    return f"{start if comma else text[: _LONGEST - 1]}\u2026"


def _title(part: GraphPart, share: float | None) -> str:
    lines = [f"{plain(part.name, 80)}: {part_text(part)}"]
    if part.reference_ms is not None:
        tuned = "" if part.tuned_ms is None else f", tuned {ms_text(part.tuned_ms)} ms"
        lines.append(f"reference {ms_text(part.reference_ms)} ms{tuned}")
    formats = [f"{count_text(count, 'node')} in {plain(name)}" for name, count in part.formats.items()]
    lines += [", ".join(formats)] if formats else []
    if share is not None and part.sqnr_db is not None:
        lines.append(
            f"quantized alone {db_text(part.sqnr_db)} dB, {share_text(share)} of the error of all blocks"
        )
    return "\n".join(lines)
