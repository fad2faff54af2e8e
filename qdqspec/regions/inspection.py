"""What `qdqspec inspect` shows of a model. May import floors 0 and 1.

Counting and judging stand here, drawing in `qdqspec.regions.render`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS
from qdqspec.regions.flow import flow_of
from qdqspec.types import Label, Region, RegionType

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCount:
    """A pattern with the number of regions that share it. ``type`` is that of the first of them."""

    digest: str
    type: RegionType
    count: int
    text: str
    nodes: int  # in one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model's region map. ``nodes`` counts the main graph without ``Constant`` nodes.

    ``quantizable`` are names of nodes with a label other than ``fp``; ``None`` where no labels were
    given. ``refusals`` counts the others by reason.
    """

    model: str
    nodes: int
    regions: tuple[Region, ...]
    patterns: tuple[PatternCount, ...]
    quantizable: frozenset[str] | None
    refusals: tuple[tuple[str, int], ...] = ()


def inspect_model(
    model: Model, regions: Sequence[Region], labels: Mapping[str, tuple[Label, ...]] | None = None
) -> Inspection:
    """Count and judge what was found. ``labels`` are a backend's, by operator: see `Capabilities`."""
    flow = flow_of(model)
    nodes = [model.nodes[index] for index in flow.order]
    quantizable: frozenset[str] | None = None
    refusals: Counter[str] = Counter()
    if labels is not None:
        reasons = {node.name: _refusal(model, node, labels, node.index in flow.carried) for node in nodes}
        quantizable = frozenset(name for name, reason in reasons.items() if not reason)
        refusals.update(reason for reason in reasons.values() if reason)
    return Inspection(
        model=model.path.name if model.path else "the model",
        nodes=len(nodes),
        regions=tuple(regions),
        patterns=_patterns(regions),
        quantizable=quantizable,
        refusals=tuple(sorted(refusals.items(), key=lambda item: (-item[1], item[0]))),
    )


def _refusal(model: Model, node: Node, labels: Mapping[str, tuple[Label, ...]], is_carried: bool) -> str:
    if is_carried:
        return "computed from shapes or constants alone"
    if not any(label != "fp" for label in labels.get(node.op_type, ())):
        return f"{node.op_type}: the backend runs it in floating point only"
    known = [t for t in (model.elem_type(tensor) for tensor in node.inputs if tensor) if t is not None]
    if not known:
        return f"{node.op_type}: element type not known"
    if not FLOATS.intersection(known):
        return f"{node.op_type}: no floating point input"
    return ""


def _patterns(regions: Sequence[Region]) -> tuple[PatternCount, ...]:
    first = {region.pattern: region for region in reversed(regions)}
    counts = Counter(region.pattern for region in regions)
    found = [
        PatternCount(
            digest=digest, type=one.type, count=counts[digest], text=one.pattern_text, nodes=len(one.nodes)
        )
        for digest, one in first.items()
    ]
    return tuple(sorted(found, key=lambda p: (-p.count * p.nodes, p.digest)))


def to_json(inspection: Inspection) -> dict[str, Any]:
    """What ``inspect --json`` prints. Never cut. ``quantizable`` is null where no backend was asked."""
    regions = [
        {
            "id": region.id,
            "type": region.type,
            "parent": region.parent,
            "children": list(region.children),
            "nodes": list(region.nodes),
            "inputs": list(region.inputs),
            "outputs": list(region.outputs),
            "pattern": region.pattern,
        }
        for region in inspection.regions
    ]
    patterns = [{"digest": p.digest, "count": p.count, "text": p.text} for p in inspection.patterns]
    count = None if inspection.quantizable is None else len(inspection.quantizable)
    coverage = {"nodes": inspection.nodes, "quantizable": count}
    return {
        "schema_version": SCHEMA_VERSION,
        "regions": regions,
        "patterns": patterns,
        "coverage": coverage,
    }
