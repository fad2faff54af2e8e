"""Generated networks for benchmarks: three families, each with variants of other depth and width.

Weights are seeded random numbers, scaled so that values neither vanish nor overflow; only times and structure matter.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """A model under construction; its methods return the name of the output tensor."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"{op_type.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def weight(self, *shape: int) -> str:
        name = f"w{len(self._weights)}"
        spread = np.sqrt(2 / max(1, np.prod(shape) / max(shape[0], shape[-1])))
        values = self._random.normal(0, spread, shape).astype(np.float32)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def conv(self, x: str, inward: int, outward: int, side: int, stride: int = 1, groups: int = 1) -> str:
        pad = [side // 2] * 4
        weight = self.weight(outward, inward // groups, side, side)
        return self.op("Conv", x, weight, self.weight(outward), pads=pad, strides=[stride] * 2, group=groups)

    def model(self, output: str, *shape: int) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def resnet(blocks: tuple[int, ...] = (2, 2, 2), width: int = 24, side: int = 32) -> onnx.ModelProto:
    """Residual blocks of two convolutions; each stage halves the image size and doubles the channels."""
    net = Net()
    x, channels = net.op("Relu", net.conv("x", 3, width, 3)), width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride, outward = (2, 2 * channels) if stage and not block else (1, channels)
            inner = net.op("Relu", net.conv(x, channels, outward, 3, stride))
            skip = net.conv(x, channels, outward, 1, stride) if stride > 1 else x
            x = net.op("Relu", net.op("Add", net.conv(inner, outward, outward, 3), skip))
            channels = outward
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.model(net.op("Gemm", pooled, net.weight(channels, 10), net.weight(10)), 1, 3, side, side)


def mobilenet(blocks: tuple[int, ...] = (2, 2, 2), width: int = 16, side: int = 48) -> onnx.ModelProto:
    """Inverted residuals: expansion by four, depthwise convolution, projection without activation."""
    net = Net()
    x, channels = net.op("Relu", net.conv("x", 3, width, 3, 2)), width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride, outward = (2, 2 * channels) if stage and not block else (1, channels)
            wide = 4 * channels
            y = net.op("Relu", net.conv(x, channels, wide, 1))
            y = net.op("Relu", net.conv(y, wide, wide, 3, stride, wide))
            y = net.conv(y, wide, outward, 1)
            x = net.op("Add", y, x) if outward == channels else y
            channels = outward
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.model(net.op("Gemm", pooled, net.weight(channels, 10), net.weight(10)), 1, 3, side, side)


def transformer(layers: int = 3, width: int = 64, tokens: int = 64) -> onnx.ModelProto:
    """Attention with one head, then two products with a Relu, each followed by a residual sum."""
    net = Net()
    x = net.op("MatMul", "x", net.weight(width, width))
    for _ in range(layers):
        query, key, value = (net.op("MatMul", x, net.weight(width, width)) for _ in range(3))
        scores = net.op("MatMul", query, net.op("Transpose", key, perm=[0, 2, 1]))
        mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), value)
        x = net.op("Add", net.op("MatMul", mixed, net.weight(width, width)), x)
        inner = net.op("Relu", net.op("MatMul", x, net.weight(width, 4 * width)))
        x = net.op("Add", net.op("MatMul", inner, net.weight(4 * width, width)), x)
    return net.model(x, 1, tokens, width)
