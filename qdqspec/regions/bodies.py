"""The graphs below the main graph, for `qdqspec inspect`: bodies of If, Loop and Scan, and local functions.

The nodes of bodies are nodes of the model and in its regions. A local function is searched as a model of its own; a
call of one is an operator that no backend lists, so that nothing is placed in it.
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
    """A graph inside a model, by its path. ``regions`` are those of a function, or those of the model inside a body.

    ``nodes`` counts it without ``Constant`` nodes and without the bodies inside it.
    """

    name: str
    kind: Literal["body", "function"]
    nodes: int
    regions: tuple[Region, ...]

    @property
    def placed(self) -> bool:
        """Whether pairs are inserted in it."""
        return self.kind == "body"


def find_bodies(model: Model, regions: Sequence[Region], find: Find) -> tuple[Body, ...]:
    """All bodies, outer ones first, in graph order; then the local functions, which ``find`` cuts into regions."""
    return (*_bodies(model, regions), *_functions(model, find))


def _bodies(model: Model, regions: Sequence[Region]) -> Iterator[Body]:
    inside: dict[str, set[str]] = {scope: set() for scope in _paths(model)}
    for node in model.nodes:
        if node.scope and not (node.is_marker or is_constant(node)):
            inside[node.scope].add(node.name)
    for path, names in inside.items():
        own = tuple(region for region in regions if names.issuperset(region.nodes))
        yield Body(name=path, kind="body", nodes=len(names), regions=own)


def _paths(model: Model) -> list[str]:
    """The paths of all bodies; a marker begins each, and outer ones begin before inner ones."""
    return list(dict.fromkeys(node.scope for node in model.nodes if node.scope))


def _functions(model: Model, find: Find) -> Iterator[Body]:
    taken = {
        "/".join(parts[:i])
        for n in model.nodes
        if (parts := n.name.split("/"))
        for i in range(len(parts) + 1)
    }
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
    """A local function as a model. Types are those of its callers, and not known here."""
    proto = onnx.ModelProto(ir_version=10, opset_import=function.opset_import)
    proto.graph.name = function.name
    proto.graph.node.extend(function.node)
    proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    return Model(proto)
