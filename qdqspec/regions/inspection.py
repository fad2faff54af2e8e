"""What `qdqspec inspect` shows of a model. May import floors 0 and 1.

Counting and judging stand here, drawing in `qdqspec.regions.inspect`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS, is_default
from qdqspec.regions.bodies import Body
from qdqspec.regions.flow import flow_of
from qdqspec.regions.forecast import Forecast
from qdqspec.types import Kind, Region, RegionType

CONTROL = frozenset({"If", "Loop", "Scan"})


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
    given. ``refusals`` counts the others by reason, ``bodies`` are the graphs inside, of which nothing is placed.
    """

    model: str
    nodes: int
    regions: tuple[Region, ...]
    patterns: tuple[PatternCount, ...]
    quantizable: frozenset[str] | None
    refusals: tuple[tuple[str, int], ...] = ()
    bodies: tuple[Body, ...] = ()
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a backend says of operators: labels and the opset that each needs, and which fuse into others."""

    labels: Mapping[str, tuple[Kind, ...]]
    since_opset: Mapping[str, int] = field(default_factory=dict)
    absorbs: Collection[str] = frozenset()


def inspect_model(
    model: Model,
    regions: Sequence[Region],
    abilities: Abilities | None = None,
    *,
    bodies: Sequence[Body] = (),
    forecast: Forecast | None = None,
) -> Inspection:
    """Count and judge what was found. ``abilities`` are a backend's."""
    flow = flow_of(model)
    nodes = [model.nodes[index] for index in flow.order]
    quantizable: frozenset[str] | None = None
    refusals: Counter[str] = Counter()
    if abilities is not None:
        reasons = {n.name: _refusal(model, n, abilities, n.index in flow.carried) for n in nodes}
        quantizable = frozenset(name for name, reason in reasons.items() if not reason)
        refusals.update(reason for reason in reasons.values() if reason)
    return Inspection(
        model=model.path.name if model.path else "the model",
        nodes=len(nodes),
        regions=tuple(regions),
        patterns=_patterns(regions),
        quantizable=quantizable,
        refusals=tuple(sorted(refusals.items(), key=lambda item: (-item[1], item[0]))),
        bodies=tuple(bodies),
        forecast=forecast,
    )


def _refusal(model: Model, node: Node, abilities: Abilities, is_carried: bool) -> str:
    """Why a node is not quantized by itself; empty where it can be."""
    op_type, labels = node.op_type, abilities.labels
    if is_carried:
        return "computed from shapes or constants alone"
    if op_type in CONTROL:
        return f"{op_type}: its bodies are listed apart; not placed: inside a body"
    if not is_default(node):
        return f"{node.domain}:{op_type}: an operator that the backend does not know"
    if not _offered(op_type, labels):
        maker = model.producer.get(node.inputs[0]) if node.inputs else None
        if op_type in abilities.absorbs and maker is not None and _offered(maker.op_type, labels):
            return f"{op_type}: quantized together with the operator before it"
        return f"{op_type}: the backend runs it in floating point only"
    if model.opset < abilities.since_opset.get(op_type, 0):
        return f"{op_type}: needs opset {abilities.since_opset[op_type]}, and the model has {model.opset}"
    known = [t for t in (model.elem_type(tensor) for tensor in node.inputs if tensor) if t is not None]
    if not known:
        return f"{op_type}: element type not known"
    if not FLOATS.intersection(known):
        return f"{op_type}: no floating point input"
    return ""


def _offered(op_type: str, labels: Mapping[str, tuple[Kind, ...]]) -> bool:
    return any(label != "fp" for label in labels.get(op_type, ()))


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
