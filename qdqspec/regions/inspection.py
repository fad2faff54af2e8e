"""Collects what `qdqspec inspect` shows of a model. `qdqspec.regions.inspect` renders it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdqspec.graph.model import Model
from qdqspec.regions.bodies import Body
from qdqspec.regions.flow import is_constant
from qdqspec.regions.forecast import Forecast
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

    `qdqspec.placement.judging` makes it. ``reasons`` by node name and ``outputs`` by graph output are empty
    texts where quantization is possible. ``note`` is a remark about the backend, such as that it is not
    installed.
    """

    backend: str
    reasons: Mapping[str, str]
    outputs: Mapping[str, str]
    note: str = ""


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
    nodes = [node.name for node in model.nodes if not (is_constant(node) or node.is_marker)]
    quantizable: frozenset[str] | None = None
    refusals: Counter[str] = Counter()
    if judged is not None:
        quantizable = frozenset(name for name in nodes if not judged.reasons[name])
        refusals.update(reason for name in nodes if (reason := judged.reasons[name]))
    return Inspection(
        model=model.path.name if model.path else "the model",
        nodes=len(nodes),
        regions=tuple(regions),
        patterns=_patterns(model, regions),
        quantizable=quantizable,
        judged=judged,
        refusals=tuple(sorted(refusals.items(), key=lambda item: (-item[1], item[0]))),
        bodies=tuple(bodies),
        forecast=forecast,
    )


def _patterns(model: Model, regions: Sequence[Region]) -> tuple[PatternCount, ...]:
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
