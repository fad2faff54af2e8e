"""The graphs below the main graph, for `qdqspec inspect`: bodies of If, Loop and Scan, and local functions.

The nodes of bodies belong to the model and to its regions. A local function is searched as a separate model;
a call of it is an operator that no backend lists, so that no Q/DQ is inserted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from qdqspec.graph.model import Model
from qdqspec.regions.flow import is_constant
from qdqspec.types import Region

Find = Callable[[Model], Sequence[Region]]


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


def find_bodies(model: Model, regions: Sequence[Region], find: Find) -> tuple[Body, ...]:
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


def _functions(model: Model, find: Find) -> Iterator[Body]:
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
