"""Models of one linear operator."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qdqspec.accuracy.corrections.layers import LinearLayer, find_layers
from qdqspec.graph.model import Model
from qdqspec.types import Consumer, Site


def linear_model(op: str, weight: np.ndarray, rank: int, **attributes: object) -> Model:
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], name="n", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * rank)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


def layer_of(model: Model) -> LinearLayer:
    site = Site(tensor="w", consumers=(Consumer("n", 1),), format="int8", weight=True)
    return find_layers(model, [site])["w"]
