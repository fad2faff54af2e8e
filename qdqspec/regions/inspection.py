"""Collects the content of `qdqspec inspect`. `qdqspec.regions.inspect` renders it.

Below the main graph are the bodies of If, Loop and Scan, and local functions. The nodes of bodies belong to the model
and to its regions. A local function is searched as a separate model; a call of it is an operator that no backend lists,
so that no Q/DQ is inserted in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from qdqspec.graph.model import Model
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


def find_bodies(
    model: Model, regions: Sequence[Region], find: Callable[[Model], Sequence[Region]]
) -> tuple[Body, ...]:
    """All bodies, outer ones first, in graph order; then the local functions, whose regions ``find`` returns."""
    return (*_bodies(model, regions), *_functions(model, find))


def _bodies(model: Model, regions: Sequence[Region]) -> Iterator[Body]:
    # the paths of all bodies; a marker begins each, and outer ones begin before inner ones
    inside: dict[str, set[str]] = {node.scope: set() for node in model.nodes if node.scope}
    for node in model.nodes:
        if node.scope and not (node.is_marker or is_constant(node)):
            inside[node.scope].add(node.name)
    for path, names in inside.items():
        own = tuple(region for region in regions if names.issuperset(region.nodes))
        yield Body(name=path, kind="body", nodes=len(names), regions=own)


def _functions(model: Model, find: Callable[[Model], Sequence[Region]]) -> Iterator[Body]:
    if not model.proto.functions:
        return
    parts = [node.name.split("/") for node in model.nodes]
    taken = {"/".join(some[:i]) for some in parts for i in range(len(some) + 1)}
    for function in model.proto.functions:
        name = f"{function.domain}:{function.name}"
        while name in taken:
            name += "~"
        found = tuple(
            replace(region, nodes=tuple(f"{name}/{node}" for node in region.nodes))
            for region in find(_of_function(function))
        )
        yield Body(name=name, kind="function", nodes=len(found[0].nodes) if found else 0, regions=found)


def _of_function(function: onnx.FunctionProto) -> Model:
    """A local function as a model. Its tensor types depend on the callers and are unknown here."""
    proto = onnx.ModelProto(ir_version=10, opset_import=function.opset_import)
    proto.graph.name = function.name
    proto.graph.node.extend(function.node)
    proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    return Model(proto)
