"""The report of `qdqspec inspect` on a model, and its rendering as text and as JSON.

Below the main graph are the bodies of If, Loop and Scan, and local functions. The nodes of bodies belong to the model
and to its regions. A local function is searched as a separate model; a call of it is an operator that no backend lists,
so that no Q/DQ is inserted in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import onnx
from tabulate import tabulate

from qdqspec._core.codec import to_data
from qdqspec._core.units import plain, seconds_text
from qdqspec.graph.flat import free_name
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.regions.forecast import Forecast
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

    `qdqspec.qdq.judging` makes it. ``reasons`` by node name and ``outputs`` by graph output are empty
    texts where quantization is possible. ``note`` is a remark about the backend.
    """

    backend: str
    reasons: Mapping[str, str]
    outputs: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A graph inside a model, identified by its path.

    ``regions`` are those of the function, or those of the model that lie in the body. ``nodes`` excludes
    ``Constant`` nodes and the bodies inside it.
    """

    name: str
    kind: Literal["body", "function"]
    nodes: int
    regions: tuple[Region, ...]

    @property
    def placed(self) -> bool:
        """Whether Q/DQ pairs are inserted in this graph."""
        return self.kind == "body"


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


def inspect_model(
    model: Model,
    regions: Sequence[Region],
    judged: Judged | None = None,
    *,
    bodies: Sequence[Body] = (),
    forecast: Forecast | None = None,
) -> Inspection:
    """Count the regions and patterns, and the nodes of ``judged`` by reason."""
    nodes = [node.name for node in model.nodes if not (is_constant_node(node) or node.is_marker)]
    quantizable: frozenset[str] | None = None
    refusals: Counter[str] = Counter()
    if judged is not None:
        quantizable = frozenset(name for name in nodes if not judged.reasons[name])
        refusals.update(reason for name in nodes if (reason := judged.reasons[name]))
    return Inspection(
        model=model.path.name if model.path else "the model",
        nodes=len(nodes),
        regions=tuple(regions),
        patterns=_count_patterns(model, regions),
        quantizable=quantizable,
        judged=judged,
        refusals=tuple(sorted(refusals.items(), key=lambda item: (-item[1], item[0]))),
        bodies=tuple(bodies),
        forecast=forecast,
    )


def _count_patterns(model: Model, regions: Sequence[Region]) -> tuple[PatternCount, ...]:
    first = {region.pattern: region for region in reversed(regions)}
    counts = Counter(region.pattern for region in regions)
    found = [
        PatternCount(
            digest=digest,
            type=one.type,
            count=counts[digest],
            text=one.pattern_text,
            nodes=len(one.nodes),
            shape=model.shape(one.outputs[0]) if one.outputs else None,
        )
        for digest, one in first.items()
    ]
    return tuple(sorted(found, key=lambda p: (-p.count * p.nodes, p.digest)))


def find_bodies(
    model: Model, regions: Sequence[Region], find: Callable[[Model], Sequence[Region]]
) -> tuple[Body, ...]:
    """All bodies, outer ones first, in graph order; then the local functions, whose regions ``find`` returns."""
    # the paths of all bodies; a marker begins each, and outer ones begin before inner ones
    inside: dict[str, set[str]] = {node.scope: set() for node in model.nodes if node.scope}
    for node in model.nodes:
        if node.scope and not (node.is_marker or is_constant_node(node)):
            inside[node.scope].add(node.name)
    found = []
    for path, names in inside.items():
        own = tuple(region for region in regions if names.issuperset(region.nodes))
        found.append(Body(name=path, kind="body", nodes=len(names), regions=own))
    parts = [node.name.split("/") for node in model.nodes] if model.proto.functions else []
    taken = {"/".join(some[:i]) for some in parts for i in range(len(some) + 1)}
    for function in model.proto.functions:
        name = free_name(f"{function.domain}:{function.name}", taken)
        own = tuple(
            replace(region, nodes=tuple(f"{name}/{node}" for node in region.nodes))
            for region in find(_model_of_function(function))
        )
        count = len(own[0].nodes) if own else 0
        found.append(Body(name=name, kind="function", nodes=count, regions=own))
    return tuple(found)


def _model_of_function(function: onnx.FunctionProto) -> Model:
    """A local function as a model. Its tensor types depend on the callers and are unknown here."""
    proto = onnx.ModelProto(ir_version=10, opset_import=function.opset_import)
    proto.graph.name = function.name
    proto.graph.node.extend(function.node)
    proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    return Model(proto)


# ---- text and JSON -------------------------------------------------------------------------------

SCHEMA_VERSION = 1
_WIDE = 72  # characters of a pattern in a line
_NAME = 60  # characters of the name of a body in a line; the JSON has the full name
_ASSUMED = 4  # dimensions of inputs that are listed
_BAR = 30  # characters of the longest bar


InspectSection: TypeAlias = Literal["regions", "patterns"]


def to_json(inspection: Inspection) -> dict[str, Any]:
    """The output of ``inspect --json``, never truncated. ``quantizable`` is null if no backend was asked."""
    count = None if inspection.quantizable is None else len(inspection.quantizable)
    bodies = [
        {name: getattr(body, name) for name in ("name", "kind", "nodes", "placed")}
        | {"regions": _list_regions(body.regions, inspection)}
        for body in inspection.bodies
    ]
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": inspection.model,
        "counts": _count_regions(inspection),
        "regions": _list_regions(inspection.regions, inspection),
        "leaf_sizes": _count_leaf_sizes(inspection),
        "patterns": [to_data(pattern) for pattern in inspection.patterns],
        "coverage": {
            "nodes": inspection.nodes,
            "in_leaves": _count_covered(inspection),
            "quantizable": count,
            "share": None if count is None else count / max(inspection.nodes, 1),
        },
        "refusals": [{"reason": reason, "count": number} for reason, number in inspection.refusals],
        "bodies": bodies,
    }
    if (judged := inspection.judged) is not None:
        found["judged"] = {"backend": judged.backend, "note": judged.note}
        found["outputs"] = [{"tensor": name, "reason": reason} for name, reason in judged.outputs.items()]
    if inspection.forecast is not None:
        found["forecast"] = forecast_to_json(inspection.forecast)
    return found


def forecast_to_json(guess: Forecast | None) -> dict[str, Any] | None:
    """The estimated time of tuning as data."""
    if guess is None:
        return None
    return {
        "builds": guess.builds,
        "low_seconds": round(guess.low_s, 1),
        "high_seconds": round(guess.high_s, 1),
        "multiplications": guess.macs,
        "assumed": list(guess.assumed),
    }


def _list_regions(regions: Iterable[Region], inspection: Inspection) -> list[dict[str, Any]]:
    """The regions, each with the number of its quantizable nodes; the text of a pattern is in ``patterns``."""
    known = inspection.quantizable
    return [
        {name: value for name, value in to_data(region).items() if name != "pattern_text"}
        | {"quantizable": None if known is None else len(known.intersection(region.nodes))}
        for region in regions
    ]


def _count_regions(inspection: Inspection) -> dict[str, int]:
    """The numbers of regions, and of patterns of leaves."""
    leaves = [region for region in inspection.regions if region.type == "LEAF"]
    composites = sum(region.type == "COMPOSITE" for region in inspection.regions)
    patterns = len({leaf.pattern for leaf in leaves})
    return {"leaf": len(leaves), "composite": composites, "leaf pattern": patterns}


def _count_covered(inspection: Inspection) -> int:
    return sum(len(region.nodes) for region in inspection.regions if region.type == "LEAF")


def render_text(
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
    tree = (_write_tree(inspection, verbose, lines, include_all), _write_bodies(inspection, lines))
    parts = (
        _write_summary(inspection),
        *(tree if not only or "regions" in only else ()),
        *((_write_sizes(inspection),) if not only else ()),
        *((_write_patterns(inspection, lines),) if not only or "patterns" in only else ()),
        *((_write_refusals(inspection, lines), _write_outputs(inspection, lines)) if not only else ()),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _write_summary(inspection: Inspection) -> str:
    numbers = {"node": inspection.nodes, **_count_regions(inspection)}
    lines = [
        f"{inspection.model}: {', '.join(_write_count(count, noun) for noun, count in numbers.items())}",
        f"coverage: {_count_covered(inspection)} of {inspection.nodes} nodes are in exactly one leaf",
    ]
    if inspection.quantizable is not None and inspection.judged is not None:
        share = len(inspection.quantizable) / max(inspection.nodes, 1)
        where = f"quantizable on {inspection.judged.backend}"
        lines.append(f"{where}: {len(inspection.quantizable)} of {inspection.nodes} nodes ({share:.0%})")
        lines += [f"note: {inspection.judged.note}"] if inspection.judged.note else []
    if inspection.forecast is not None:
        lines.append(forecast_line(inspection.forecast))
    return "\n".join(lines)


def forecast_line(guess: Forecast) -> str:
    """The estimated time of a search, as a sentence."""
    low, high = (seconds_text(seconds) for seconds in (guess.low_s, guess.high_s))
    assumed = _join_names([plain(name) for name in guess.assumed], _ASSUMED)
    assumed = f" (unknown sizes taken as 1: {assumed})" if assumed else ""
    macs = f"{guess.macs / 1e6:,.0f} million" if guess.macs >= 1e6 else "less than a million"
    return (
        f"the search may take {low} to {high}: {guess.builds} builds, estimated from node count, weights and "
        f"{macs} multiplications{assumed}; nothing was built; calibration before it, and the "
        "timing of its finalists and the comparison of outputs after it, come on top"
    )


def _write_bodies(inspection: Inspection, most: int) -> str:
    """One line for each inner graph. The tree has the regions of bodies, the JSON has the regions of functions."""
    rows = [
        (
            body.kind,
            body.nodes,
            sum(r.type == "LEAF" for r in body.regions),
            plain(body.name, _NAME),
            _shorten(body.regions[0].pattern_text) if body.regions else "constants only",
        )
        for body in inspection.bodies
    ]
    functions = any(not body.placed for body in inspection.bodies)
    title = f"Bodies of If, Loop and Scan{' (nothing is placed in local functions)' if functions else ''}"
    return _write_table(title, ("kind", "nodes", "leaves", "name", "pattern"), rows, most)


def _write_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], most: int, *, numbers: bool = False
) -> str:
    """The first ``most`` rows under a title, if any; with ``numbers``, texts of digits are aligned as numbers."""
    if not rows:
        return ""
    table = tabulate(rows[:most], headers=heads, tablefmt="simple", disable_numparse=not numbers)
    rest = f"\n... and {len(rows) - most} more" if len(rows) > most else ""
    return f"{title}\n{table}{rest}"


def _write_count(count: int, noun: str) -> str:
    plural = "leaves" if noun == "leaf" else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _write_tree(inspection: Inspection, verbose: bool, most: int, include_all: bool) -> str:
    known = None if include_all else inspection.quantizable
    shown = [
        region
        for region in inspection.regions
        if known is None or region.type == "ROOT" or not known.isdisjoint(region.nodes)
    ]
    lines = ["Regions (direct/all nodes, inputs > outputs, pattern)"]
    for region in shown[:most]:
        lines += _write_region(region, inspection, verbose, most)
    if len(shown) > most:
        lines.append(f"... and {len(shown) - most} more")
    if hidden := len(inspection.regions) - len(shown):
        lines.append(
            f"({_write_count(hidden, 'region')} with nothing to quantize not shown; --include-all shows them)"
        )
    return "\n".join(lines)


def _write_region(region: Region, inspection: Inspection, verbose: bool, most: int) -> list[str]:
    indent = _indent(region)
    lines = [f"{indent}{region.id} {_describe_region(region, inspection)}"]
    if verbose:
        lines.append(f"{indent}    pattern {region.pattern}")
        details = {"inputs": region.inputs, "outputs": region.outputs}
        details |= {"nodes": region.nodes} if region.type == "LEAF" else {}
        lines += [
            f"{indent}    {word} {_join_names(names, most)}" for word, names in details.items() if names
        ]
    return lines


def _indent(region: Region) -> str:
    return "  " * region.id.count(".")


def _describe_region(region: Region, inspection: Inspection) -> str:
    direct = len(region.nodes) if region.type == "LEAF" else 0
    below = len(region.children)
    children = f", {below} child{'ren' if below > 1 else ''}" if below else ""
    quantizable = ""
    if inspection.quantizable is not None:
        quantizable = f", {len(inspection.quantizable.intersection(region.nodes))} quantizable"
    flow = f"{len(region.inputs)} > {len(region.outputs)}{quantizable}"
    return f"{region.type} {direct}/{len(region.nodes)}{children}, {flow}  {_shorten(region.pattern_text)}"


def _join_names(names: Sequence[str], most: int) -> str:
    rest = f", ... and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _write_sizes(inspection: Inspection) -> str:
    bins = _count_leaf_sizes(inspection)
    longest = max(bins.values(), default=1)
    rows = [(name, count, "#" * max(1, round(_BAR * count / longest))) for name, count in bins.items()]
    return _write_table("Leaf sizes", ("nodes", "leaves", ""), rows, len(rows))


def _count_leaf_sizes(inspection: Inspection) -> dict[str, int]:
    """The number of leaves by size: one bin per size up to ten nodes, then up to the next power of two."""
    counts = Counter(len(r.nodes) for r in inspection.regions if r.type == "LEAF")
    bins: dict[str, int] = {}
    for size in sorted(counts):
        low, high = size, size
        if size > 10:
            high = 1 << (size - 1).bit_length()
            low = max(11, high // 2 + 1)
        name = str(size) if low == high else f"{low}-{high}"
        bins[name] = bins.get(name, 0) + counts[size]
    return bins


def _write_patterns(inspection: Inspection, most: int) -> str:
    below_root = (p for p in inspection.patterns if p.type != "ROOT")
    rows = [(p.count, p.nodes, p.type, p.digest, _write_shape(p.shape), _shorten(p.text)) for p in below_root]
    return _write_table(
        "Patterns", ("count", "nodes", "type", "digest", "output", "pattern"), rows, most, numbers=True
    )


def _write_shape(shape: Sequence[int | None] | None) -> str:
    return "?" if shape is None else "x".join("?" if dim is None else str(dim) for dim in shape) or "scalar"


def _write_refusals(inspection: Inspection, most: int) -> str:
    rows = [(count, reason) for reason, count in inspection.refusals]
    return _write_table("Not quantizable", ("nodes", "why"), rows, most, numbers=True)


def _write_outputs(inspection: Inspection, most: int) -> str:
    """Graph outputs that stay float, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for tensor, reason in inspection.judged.outputs.items() if inspection.judged else ():
        if reason:
            reasons.setdefault(reason, []).append(tensor)
    rows = [(len(names), _shorten(_join_names(names, 4)), reason) for reason, names in reasons.items()]
    return _write_table("Graph outputs that stay float", ("count", "outputs", "why"), rows, most)


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 4] + " ..."
