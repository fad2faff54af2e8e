"""A small model that is faster in integers on the simulated device."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SHAPE = (1, 8, 12, 12)  # of its input "x" and its output "y"


def chain_model(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions with activations and a residual, large enough to be faster in integers."""
    random = np.random.default_rng(seed)
    weights = [random.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32) for _ in range(3)]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "conv0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu0"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"], "add"),
        helper.make_node("Conv", ["d", "w2"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
