"""Bodies of If, Loop and Scan, and local functions, searched as graphs of their own. May import floors 0 and 1.

Their nodes are named by where they stand: ``If_0/then_branch/Conv_3`` is node ``Conv_3`` of branch
``then_branch`` of ``If_0``; where the main graph has names that begin so, a ``~`` tells them apart. Nothing is
placed there: insertion leaves bodies alone, and calls of local functions are operators that no backend lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import onnx
from onnx import TensorProto, helper

from qdqspec.graph.model import Model
from qdqspec.graph.protos import copy_fields
from qdqspec.types import Region

_LOOKED_INTO = 1024  # elements: larger values say nothing of shapes, and are not copied
Find = Callable[[Model], Sequence[Region]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A graph inside a model, by its path. ``regions`` are as those of a model, with full node names.

    ``nodes`` counts it without ``Constant`` nodes and without the bodies inside it.
    """

    name: str
    kind: Literal["body", "function"]
    nodes: int
    regions: tuple[Region, ...]


def find_bodies(model: Model, find: Find) -> tuple[Body, ...]:
    """All bodies, outer ones first, in graph order; then the local functions. ``find`` cuts one into regions.

    Tensors that a body reads from outside count as its inputs, or as constants where they are that.
    """
    namer = _Namer(model)
    found: list[Body] = []
    pending = list(_inside(model, "", namer))[::-1]
    while pending:
        name, inner = pending.pop()
        found.append(_body(name, "body", inner, find))
        pending.extend(list(_inside(inner, f"{name}/", namer))[::-1])
    for function in model.proto.functions:
        name = namer.free(f"{function.domain}:{function.name}")
        found.append(_body(name, "function", _of_function(function), find))
    return tuple(found)


class _Namer:
    """Paths that no node of the main graph stands under."""

    def __init__(self, model: Model) -> None:
        self._taken: set[str] = set()
        for node in model.nodes:
            parts = node.name.split("/")
            self._taken.update("/".join(parts[:i]) for i in range(1, len(parts) + 1))

    def free(self, wanted: str) -> str:
        """The path, or one like it, taken from now on."""
        while wanted in self._taken:
            wanted += "~"
        self._taken.add(wanted)
        return wanted


def _inside(outer: Model, prefix: str, namer: _Namer) -> Iterator[tuple[str, Model]]:
    for node in outer.nodes:
        for attribute in node.proto.attribute:
            graphs = [attribute.g] if attribute.HasField("g") else attribute.graphs
            for number, graph in enumerate(graphs):
                part = f".{number}" if attribute.graphs else ""
                name = namer.free(f"{prefix}{node.name}/{attribute.name}{part}")
                yield name, _of_graph(graph, outer, node.body_reads)


def _of_graph(graph: onnx.GraphProto, outer: Model, reads: frozenset[str]) -> Model:
    """A body as a model: what it reads from outside are inputs and constants of its own."""
    proto = onnx.ModelProto(ir_version=outer.proto.ir_version, opset_import=outer.proto.opset_import)
    proto.graph.SetInParent()
    copy_fields(graph, proto.graph, but={"initializer"})
    proto.graph.initializer.extend(_light(tensor, tensor.name) for tensor in graph.initializer)
    own = {output for node in graph.node for output in node.output}
    own.update(value.name for value in (*graph.input, *graph.initializer))
    for name in sorted(reads - own):
        if name in outer.constants:
            proto.graph.initializer.append(_light(outer.constants[name], name))
        elif name in outer.types or name in outer.producer or name in outer.inputs:
            proto.graph.input.append(_typed(outer, name))
    return Model(proto)


def _typed(outer: Model, name: str) -> onnx.ValueInfoProto:
    known = outer.types.get(name)
    if known is None:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, known.elem_type, known.shape)


def _light(tensor: TensorProto, name: str) -> TensorProto:
    """A constant without its values, where they are many; marked as standing elsewhere."""
    if int(prod(tensor.dims)) > _LOOKED_INTO:
        light = TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        light.data_location = TensorProto.EXTERNAL
        return light
    copied = TensorProto()
    copied.CopyFrom(tensor)
    copied.name = name
    return copied


def _of_function(function: onnx.FunctionProto) -> Model:
    """A local function as a model. Types are those of its callers, and not known here."""
    proto = onnx.ModelProto(ir_version=10, opset_import=function.opset_import)
    proto.graph.name = function.name
    proto.graph.node.extend(function.node)
    proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    return Model(proto)


def _body(name: str, kind: Literal["body", "function"], inner: Model, find: Find) -> Body:
    regions = tuple(
        replace(region, nodes=tuple(f"{name}/{node}" for node in region.nodes)) for region in find(inner)
    )
    return Body(name=name, kind=kind, nodes=len(regions[0].nodes) if regions else 0, regions=regions)
