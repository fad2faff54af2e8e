"""The report of `qdqspec inspect` on a model, and its rendering as text and as JSON.

Below the main graph are the bodies of If, Loop and Scan. The nodes of bodies belong to the model and to its regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tabulate import tabulate

from qdqspec._core.records import to_data
from qdqspec._core.units import count_text, list_text, plain
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.regions.forecast import Forecast, forecast_line
from qdqspec.types import Region, RegionType


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCount:
    """A pattern with the number of regions that share it. ``type`` is that of the first of them.

    Patterns of equal text may differ in shapes and attributes; ``shape`` is that of the first output,
    ``None`` if its rank is unknown, with ``None`` for each unknown dimension.
    """

    digest: str
    type: RegionType
    count: int
    text: str
    nodes: int  # in one of them
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The nodes that a backend's search may quantize, and reasons against the others.

    `qdqspec.qdq.search_space` makes it. ``reasons`` by node name and ``outputs`` by graph output are empty
    texts where quantization is possible. ``note`` is a remark about the backend.
    """

    backend: str
    reasons: Mapping[str, str]
    outputs: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Body:
    """A body, identified by its path, and the regions that lie in it.

    ``nodes`` excludes ``Constant`` nodes and the bodies inside it.
    """

    name: str
    nodes: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model's region map. ``nodes`` counts those of all graphs without ``Constant`` nodes.

    ``quantizable`` are names of nodes that a search can label; ``None`` if no backend was asked. ``refusals``
    counts the others by reason, ``bodies`` are the graphs inside.
    """

    model: str
    nodes: int
    regions: tuple[Region, ...]
    patterns: tuple[PatternCount, ...]
    quantizable: frozenset[str] | None
    judged: Judged | None = None
    refusals: tuple[tuple[str, int], ...] = ()
    bodies: tuple[Body, ...] = ()
    forecast: Forecast | None = None

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that partition the nodes."""
        return tuple(region for region in self.regions if region.type == "LEAF")


def inspect_model(
    model: Model,
    regions: Sequence[Region],
    judged: Judged | None = None,
    *,
    forecast: Forecast | None = None,
) -> Inspection:
    """Count the regions and patterns, and the nodes of ``judged`` by reason."""
    nodes = [node.name for node in model.nodes if not (is_constant_node(node) or node.is_marker)]
    reasons = {} if judged is None else {name: judged.reasons[name] for name in nodes}
    refusals = Counter(reason for reason in reasons.values() if reason)
    counts = Counter(region.pattern for region in regions)
    patterns = [
        PatternCount(
            digest=digest,
            type=first.type,
            count=counts[digest],
            text=first.pattern_text,
            nodes=len(first.nodes),
            shape=model.shape(first.outputs[0]) if first.outputs else None,
        )
        for digest, first in {region.pattern: region for region in reversed(regions)}.items()
    ]
    return Inspection(
        model=model.path.name if model.path else "the model",
        nodes=len(nodes),
        regions=tuple(regions),
        patterns=tuple(sorted(patterns, key=lambda p: (-p.count * p.nodes, p.digest))),
        quantizable=None if judged is None else frozenset(n for n, reason in reasons.items() if not reason),
        judged=judged,
        refusals=tuple(sorted(refusals.items(), key=lambda item: (-item[1], item[0]))),
        bodies=find_bodies(model, regions),
        forecast=forecast,
    )


def find_bodies(model: Model, regions: Sequence[Region]) -> tuple[Body, ...]:
    """All bodies, outer ones first, in graph order."""
    # the paths of all bodies; a marker begins each, and outer ones begin before inner ones
    inside: dict[str, set[str]] = {node.scope: set() for node in model.nodes if node.scope}
    for node in model.nodes:
        if node.scope and not (node.is_marker or is_constant_node(node)):
            inside[node.scope].add(node.name)
    return tuple(
        Body(path, len(names), tuple(region for region in regions if names.issuperset(region.nodes)))
        for path, names in inside.items()
    )


# ---- text and JSON -------------------------------------------------------------------------------

SCHEMA_VERSION = 1
_WIDE = 72  # characters of a pattern in a line
_NAME = 60  # characters of the name of a body in a line; the JSON has the full name
_BAR = 30  # characters of the longest bar

InspectSection: TypeAlias = Literal["regions", "patterns"]


def inspection_to_json(inspection: Inspection) -> dict[str, Any]:
    """The output of ``inspect --json``, never truncated. ``quantizable`` is null if no backend was asked."""
    known = inspection.quantizable
    count = None if known is None else len(known)

    def listed(regions: Sequence[Region]) -> list[dict[str, Any]]:
        """The regions, each with the number of its quantizable nodes; the text of a pattern is in ``patterns``."""
        return [
            {name: value for name, value in to_data(region).items() if name != "pattern_text"}
            | {"quantizable": None if known is None else len(known.intersection(region.nodes))}
            for region in regions
        ]

    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": inspection.model,
        "counts": _count_regions(inspection),
        "regions": listed(inspection.regions),
        "leaf_sizes": _count_leaf_sizes(inspection),
        "patterns": [to_data(pattern) for pattern in inspection.patterns],
        "coverage": {
            "nodes": inspection.nodes,
            "in_leaves": sum(len(leaf.nodes) for leaf in inspection.leaves),
            "quantizable": count,
            "share": None if count is None else count / max(inspection.nodes, 1),
        },
        "refusals": [{"reason": reason, "count": number} for reason, number in inspection.refusals],
        "bodies": [
            {
                "name": body.name,
                "kind": "body",
                "nodes": body.nodes,
                "placed": True,
                "regions": listed(body.regions),
            }
            for body in inspection.bodies
        ],
    }
    if (judged := inspection.judged) is not None:
        found["judged"] = {"backend": judged.backend, "note": judged.note}
        found["outputs"] = [{"tensor": name, "reason": reason} for name, reason in judged.outputs.items()]
    if inspection.forecast is not None:
        found["forecast"] = to_data(inspection.forecast)
    return found


def _count_regions(inspection: Inspection) -> dict[str, int]:
    """The numbers of regions, and of patterns of leaves."""
    composites = sum(region.type == "COMPOSITE" for region in inspection.regions)
    patterns = len({leaf.pattern for leaf in inspection.leaves})
    return {"leaf": len(inspection.leaves), "composite": composites, "leaf pattern": patterns}


def _count_leaf_sizes(inspection: Inspection) -> dict[str, int]:
    """The number of leaves by size: one bin per size up to ten nodes, then up to the next power of two."""
    counts = Counter(len(leaf.nodes) for leaf in inspection.leaves)
    bins: Counter[str] = Counter()
    for size in sorted(counts):
        name = str(size)
        if size > 10:
            high = 1 << (size - 1).bit_length()
            name = f"{max(11, high // 2 + 1)}-{high}"
        bins[name] += counts[size]
    return dict(bins)


def inspection_text(
    inspection: Inspection,
    *,
    verbose: bool = False,
    lines: int = 40,
    include_all: bool = False,
    only: Collection[InspectSection] = (),
) -> str:
    """The inspection as text, or ``only`` some sections.

    At most ``lines`` regions of the tree, rows of a table and names of a list are shown; ``verbose`` shows node names
    and boundaries too. ``include_all`` adds regions that have nothing to quantize.
    """
    parts = [_write_summary(inspection)]
    if not only or "regions" in only:
        parts += [_write_tree(inspection, verbose, lines, include_all), _write_bodies(inspection, lines)]
    if not only:
        bins = _count_leaf_sizes(inspection)
        longest = max(bins.values(), default=1)
        sizes = [(name, count, "#" * max(1, round(_BAR * count / longest))) for name, count in bins.items()]
        parts.append(_write_table("Leaf sizes", ("nodes", "leaves", ""), sizes, len(sizes)))
    if not only or "patterns" in only:
        parts.append(_write_patterns(inspection, lines))
    if not only:
        why = [(count, reason) for reason, count in inspection.refusals]
        parts.append(_write_table("Not quantizable", ("nodes", "why"), why, lines, numbers=True))
        parts.append(_write_outputs(inspection, lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def _write_summary(inspection: Inspection) -> str:
    covered = sum(len(leaf.nodes) for leaf in inspection.leaves)
    counts = ", ".join(
        count_text(count, noun, "leaves" if noun == "leaf" else "")
        for noun, count in {"node": inspection.nodes, **_count_regions(inspection)}.items()
    )
    lines = [
        f"{inspection.model}: {counts}",
        f"coverage: {covered} of {inspection.nodes} nodes are in exactly one leaf",
    ]
    if inspection.quantizable is not None and inspection.judged is not None:
        share = len(inspection.quantizable) / max(inspection.nodes, 1)
        where = f"quantizable on {inspection.judged.backend}"
        lines.append(f"{where}: {len(inspection.quantizable)} of {inspection.nodes} nodes ({share:.0%})")
        lines += [f"note: {inspection.judged.note}"] if inspection.judged.note else []
    if inspection.forecast is not None:
        lines.append(forecast_line(inspection.forecast))
    return "\n".join(lines)


def _write_tree(inspection: Inspection, verbose: bool, most: int, include_all: bool) -> str:
    known = inspection.quantizable
    shown = [
        region
        for region in inspection.regions
        if known is None or include_all or region.type == "ROOT" or not known.isdisjoint(region.nodes)
    ]
    lines = ["Regions (direct/all nodes, inputs > outputs, pattern)"]
    for region in shown[:most]:
        indent = "  " * region.id.count(".")
        direct = len(region.nodes) if region.type == "LEAF" else 0
        below = len(region.children)
        children = f", {count_text(below, 'child', 'children')}" if below else ""
        able = "" if known is None else f", {len(known.intersection(region.nodes))} quantizable"
        text = _shorten(region.pattern_text)
        sizes = f"{direct}/{len(region.nodes)}{children}, {len(region.inputs)} > {len(region.outputs)}{able}"
        lines.append(f"{indent}{region.id} {region.type} {sizes}  {text}")
        if verbose:
            lines.append(f"{indent}    pattern {region.pattern}")
            details = {"inputs": region.inputs, "outputs": region.outputs}
            details |= {"nodes": region.nodes} if region.type == "LEAF" else {}
            lines += [f"{indent}    {word} {list_text(row, most)}" for word, row in details.items() if row]
    if len(shown) > most:
        lines.append(f"... and {len(shown) - most} more")
    if hidden := len(inspection.regions) - len(shown):
        lines.append(
            f"({count_text(hidden, 'region')} with nothing to quantize not shown; --include-all shows them)"
        )
    return "\n".join(lines)


def _write_bodies(inspection: Inspection, most: int) -> str:
    """One line for each body. The tree has their regions."""
    rows = [
        (
            body.nodes,
            sum(r.type == "LEAF" for r in body.regions),
            plain(body.name, _NAME),
            _shorten(body.regions[0].pattern_text) if body.regions else "constants only",
        )
        for body in inspection.bodies
    ]
    return _write_table("Bodies of If, Loop and Scan", ("nodes", "leaves", "name", "pattern"), rows, most)


def _write_patterns(inspection: Inspection, most: int) -> str:
    rows = []
    for one in (pattern for pattern in inspection.patterns if pattern.type != "ROOT"):
        shape = "?" if one.shape is None else "x".join("?" if d is None else str(d) for d in one.shape)
        rows.append((one.count, one.nodes, one.type, one.digest, shape or "scalar", _shorten(one.text)))
    heads = ("count", "nodes", "type", "digest", "output", "pattern")
    return _write_table("Patterns", heads, rows, most, numbers=True)


def _write_outputs(inspection: Inspection, most: int) -> str:
    """Graph outputs that stay float, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for tensor, reason in inspection.judged.outputs.items() if inspection.judged else ():
        if reason:
            reasons.setdefault(reason, []).append(tensor)
    rows = [(len(names), _shorten(list_text(names, 4)), reason) for reason, names in reasons.items()]
    return _write_table("Graph outputs that stay float", ("count", "outputs", "why"), rows, most)


def _write_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], most: int, *, numbers: bool = False
) -> str:
    """The first ``most`` rows under a title, if any; with ``numbers``, texts of digits are aligned as numbers."""
    if not rows:
        return ""
    table = tabulate(rows[:most], headers=heads, tablefmt="simple", disable_numparse=not numbers)
    rest = f"\n... and {len(rows) - most} more" if len(rows) > most else ""
    return f"{title}\n{table}{rest}"


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 4] + " ..."
