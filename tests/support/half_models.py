"""Float16 forms of float32 models, for tests."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.protos import all_graphs, map_tensors

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
