"""Small models of one operator on quantized inputs, for tests of the operator tables of backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.types import LayerTime

IMAGE = (1, 8, 6, 6)
MATRIX = (4, 32)


class Graph:
    """Grows a graph node by node; tensors are names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.others: list[str] = []  # outputs of the operator beside the first
        self.random = np.random.default_rng(0)

    def const(self, value: object, dtype: type | None = None) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, op: str, *inputs: str, count: int = 1, **attributes: object) -> str:
        first = f"t{len(self.nodes)}"
        outputs = [first, *(f"{first}_{i}" for i in range(1, count))]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, f"n{len(self.nodes)}", **attributes))
        self.others.extend(outputs[1:])
        return outputs[0]

    def pair(self, tensor: str, zero: int = 128, scale: float = 0.02, dtype: type = np.uint8) -> str:
        numbers = (self.const(scale, np.float32), self.const(zero, dtype))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", tensor, *numbers), *numbers)

    def input(self, shape: tuple[int | str, ...], **numbers: object) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return self.pair(name, **numbers)

    def weight(self, *shape: int, axis: int | None, values: object = None) -> str:
        scale, zero = (np.full(shape[axis], 0.01), np.zeros(shape[axis])) if axis is not None else (0.01, 0)
        stored = self.const(self.random.integers(-127, 128, shape) if values is None else values, np.int8)
        numbers = (self.const(scale, np.float32), self.const(zero, np.int8))
        return self.node("DequantizeLinear", stored, *numbers, axis=axis)

    def full(self, *shape: int, axis: int, value: int = 127) -> str:
        """A weight whose integers are all the same."""
        return self.weight(*shape, axis=axis, values=np.full(shape, value))

    def bias(self, channels: int, scale: float = 0.02 * 0.01) -> str:
        numbers = (np.full(channels, scale, np.float32), np.zeros(channels, np.int32))
        stored = self.const(self.random.integers(-999, 999, channels), np.int32)
        return self.node("DequantizeLinear", stored, *(self.const(n) for n in numbers), axis=0)

    def model(self, *outputs: str, opset: int = 17) -> onnx.ModelProto:
        results = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
        graph = helper.make_graph(self.nodes, "one", self.inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def conv(g: Graph, x: str, *rest: str, group: int = 1, axis: int | None = 0) -> str:
    weight = g.weight(8, 8 // group, 3, 3, axis=axis)
    return g.node("Conv", x, weight, *rest, pads=[1, 1, 1, 1], group=group)


def indices(g: Graph, *values: int) -> str:
    return g.const(values, np.int64)


# op type -> the operator on quantized inputs; the functions create further inputs
ONE: dict[str, Callable[[Graph, str], str]] = {
    "Add": lambda g, x: g.node("Add", x, g.input(IMAGE, scale=0.03)),
    "AveragePool": lambda g, x: g.node("AveragePool", x, kernel_shape=[2, 2]),
    "Concat": lambda g, x: g.node("Concat", x, g.input(IMAGE, scale=0.03), axis=1),
    "Conv": conv,
    "DepthToSpace": lambda g, x: g.node("DepthToSpace", x, blocksize=2),
    "Expand": lambda g, x: g.node("Expand", x, indices(g, 2, 8, 6, 6)),
    "Flatten": lambda g, x: g.node("Flatten", x),
    "Gather": lambda g, x: g.node("Gather", x, indices(g, 0, 2), axis=1),
    "GatherElements": lambda g, x: g.node("GatherElements", x, g.const(np.zeros(IMAGE, np.int64)), axis=1),
    "Gemm": lambda g, x: g.node("Gemm", x, g.weight(32, 16, axis=1), g.bias(16)),
    "GlobalAveragePool": lambda g, x: g.node("GlobalAveragePool", x),
    "LeakyRelu": lambda g, x: g.node("LeakyRelu", x, alpha=0.1),
    "MatMul": lambda g, x: g.node("MatMul", x, g.weight(32, 16, axis=1)),
    "MaxPool": lambda g, x: g.node("MaxPool", x, kernel_shape=[2, 2]),
    "Mul": lambda g, x: g.node("Mul", x, g.input(IMAGE, scale=0.03)),
    "Reshape": lambda g, x: g.node("Reshape", x, indices(g, 1, -1)),
    "Resize": lambda g, x: g.node("Resize", x, "", g.const([1, 1, 2, 2], np.float32), mode="nearest"),
    "Sigmoid": lambda g, x: g.node("Sigmoid", x),
    "Slice": lambda g, x: g.node("Slice", x, *(indices(g, v) for v in (0, 4, 1))),
    "Softmax": lambda g, x: g.node("Softmax", x, axis=-1),
    "Split": lambda g, x: g.node("Split", x, count=2, axis=1),
    "Squeeze": lambda g, x: g.node("Squeeze", x, indices(g, 0)),
    "Tile": lambda g, x: g.node("Tile", x, indices(g, 2, 1, 1, 1)),
    "Transpose": lambda g, x: g.node("Transpose", x, perm=[0, 2, 3, 1]),
    "Unsqueeze": lambda g, x: g.node("Unsqueeze", x, indices(g, 0)),
    "Where": lambda g, x: g.node("Where", g.const(np.ones(IMAGE, bool)), x, g.input(IMAGE, scale=0.03)),
}


def layers_of(backend: Backend, model: onnx.ModelProto, folder: Path) -> tuple[LayerTime, ...]:
    """The kernels that a model runs on random inputs."""
    path = folder / "one.onnx"
    onnx.save(model, path)
    shapes = {i.name: [d.dim_value or 4 for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    with closing(backend.build(path, BuildOptions())) as engine:
        random = np.random.default_rng(0)
        engine.bind({name: random.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()})
        layers = engine.layers(1)
    assert layers, "the profile did not fit the graph"
    return layers


def runs_in_integers(backend: Backend, model: onnx.ModelProto, folder: Path, op: str) -> bool:
    """Whether all kernels that compute operators of a type read integers."""
    wanted = {node.name for node in model.graph.node if node.op_type == op}
    own = [layer for layer in layers_of(backend, model, folder) if wanted & {*layer.nodes}]
    assert own, f"no kernel computes {op}"
    return all(layer.integer for layer in own)
