"""Copies of models: in float16, or renamed and reordered."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.protos import all_graphs, map_tensors

PREFIX = "z/"
_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def in_float16(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float16 in place of float32, its inputs and outputs too."""

    def converted(tensor: TensorProto) -> TensorProto:
        if tensor.data_type != _FLOAT:
            return tensor
        return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)

    half = map_tensors(proto, converted)
    for graph in all_graphs(half.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == _FLOAT:
                value.type.tensor_type.elem_type = _HALF
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == _FLOAT:
                    attribute.CopyFrom(helper.make_attribute(attribute.name, _HALF))
    return half


def renamed_and_reordered(proto: onnx.ModelProto, chance: random.Random) -> onnx.ModelProto:
    """A copy with each tensor and node of the main graph renamed, its nodes in another topological order.

    It tests that nothing depends on names or node order. Tensors in bodies are renamed too; bodies keep the order of
    their nodes, and local functions are unchanged.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    nodes = _shuffled(copy.graph, chance)
    for index, node in enumerate(nodes):
        node.name = f"n{index}"
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    _rename(copy.graph)
    return copy


def _shuffled(graph: onnx.GraphProto, chance: random.Random) -> list[onnx.NodeProto]:
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    after: dict[int, list[int]] = {}
    waits = []
    for index, node in enumerate(graph.node):
        before = {maker[name] for name in _reads(node) if name in maker}
        waits.append(len(before))
        for earlier in before:
            after.setdefault(earlier, []).append(index)
    ready = [index for index, count in enumerate(waits) if not count]
    order = []
    while ready:
        index = ready.pop(chance.randrange(len(ready)))
        order.append(graph.node[index])
        for later in after.get(index, ()):
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return order


def _reads(node: onnx.NodeProto) -> set[str]:
    inside = {name for graph in _bodies(node) for inner in graph.node for name in _reads(inner)}
    return {*node.input, *inside}


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]


def _rename(graph: onnx.GraphProto) -> None:
    """Rename each tensor, including those in bodies, which `onnx.compose.add_prefix` does not rename."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = PREFIX + value.name
    for node in graph.node:
        for names in (node.input, node.output):
            renamed = [name and PREFIX + name for name in names]
            del names[:]
            names.extend(renamed)
        for body in _bodies(node):
            _rename(body)
