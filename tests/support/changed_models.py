"""Copies of models: in float16, or renamed and reordered."""

from __future__ import annotations

import random
from graphlib import TopologicalSorter

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.protos import all_graphs, copied, map_tensors, names_read_inside, refill

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
    """A renamed copy whose nodes are in another topological order; bodies keep the order of their nodes.

    It tests that nothing depends on names or node order.
    """
    copy = copied(proto)
    refill(copy.graph.node, _shuffled(copy.graph, chance))
    return renamed(copy)


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with each tensor and node of the main graph renamed; tensors in bodies too, and no local functions."""
    copy = copied(proto)
    for index, node in enumerate(copy.graph.node):
        node.name = f"n{index}"
    for graph in all_graphs(copy.graph):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = PREFIX + value.name
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [name and PREFIX + name for name in names]
    return copy


def _shuffled(graph: onnx.GraphProto, chance: random.Random) -> list[onnx.NodeProto]:
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    sorter = TopologicalSorter()
    for index, node in enumerate(graph.node):
        sorter.add(index, *{maker[name] for name in {*node.input} | names_read_inside(node) if name in maker})
    sorter.prepare()
    ready, order = list(sorter.get_ready()), []
    while ready:
        index = ready.pop(chance.randrange(len(ready)))
        order.append(copied(graph.node[index]))
        sorter.done(index)
        ready += sorter.get_ready()
    return order
