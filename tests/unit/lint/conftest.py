"""Small models with pairs, written as ONNX text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.graph.model import Model

F32 = np.float32
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.integers(-64, 65, (16, 16, 3, 3)).astype(np.int8)
MATRIX = RANDOM.integers(-64, 65, (16, 16)).astype(np.int8)

# Constants that every text may use; a test may add or replace some.
CONSTANTS: dict[str, np.ndarray] = {
    "s": np.array(0.05, F32), "s2": np.array(0.07, F32), "z": np.array(0, np.int8), "zu": np.array(128, np.uint8),
    "z0": np.array(0, np.uint8), "w": WEIGHT, "ws": np.full(16, 0.01, F32), "wz": np.zeros(16, np.int8),
    "m": MATRIX, "b": np.zeros(16, F32), "bi": np.arange(16, dtype=np.int32),
    "bs": np.full(16, 0.05 * 0.01, F32), "fw": WEIGHT.astype(F32),
}  # fmt: skip


@pytest.fixture
def parsed() -> Callable[..., Model]:
    """``parsed("float[1,16,8,8] x", "y", "y = Relu(x)")``: a model with these inputs, outputs and nodes."""

    def parse(inputs: str, outputs: str, nodes: str, opset: int = 21, **constants: np.ndarray) -> Model:
        head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "trt": 1]>'
        ends = ", ".join(f"float {name}" for name in outputs.split(", "))
        proto = onnx.parser.parse_model(f"{head} g ({inputs}) => ({ends}) {{ {nodes} }}")
        for output in proto.graph.output:
            output.type.tensor_type.ClearField("shape")
        read = {name for node in proto.graph.node for name in node.input}
        known = CONSTANTS | constants
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(known[name]), name) for name in sorted(read & known.keys())
        )
        proto.ir_version = 10 if opset < 23 else 11
        for index, node in enumerate(proto.graph.node):
            node.name = node.name or f"{node.output[0]}:{node.op_type}:{index}"
        return Model(proto)

    return parse
