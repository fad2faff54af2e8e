"""The models that are built on a GPU: small ones in each format, ResNet-18 with four placements, one above 2 GB.

Weights are random: these models answer whether a format builds and how long it takes, not how accurate it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.model import Model
from qdqspec.placement.insert import insert_qdq
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site

if TYPE_CHECKING:
    import onnx

    from qdqspec.arrays import Array

IMAGE = (1, 16, 32, 32)
ROWS = (32, 256)
_OPSET = 21
_RANGE = TensorRange(-4.0, 4.0)
_SIDE = 16384  # rows and columns of a weight of the large model
_STAGES = (64, 128, 256, 512)
RESNET_INPUT = (32, 3, 224, 224)
PLACEMENTS = ("fp16", "qat", "residual", "residual-qgap")  # of ResNet-18


@dataclass(slots=True)
class _Net:
    """Nodes and weights of a model while it is written; every node is named after its output."""

    dtype: str = "float32"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def weight(self, name: str, *shape: int) -> str:
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        values = self.random.normal(0, (2 / fan_in) ** 0.5, shape)
        self.weights[name] = values.astype(self.dtype)
        return name

    def conv(self, source: str, output: str, into: int, out: int, size: int = 3, stride: int = 1) -> str:
        names = [
            source,
            self.weight(f"{output}.weight", out, into, size, size),
            self.weight(f"{output}.bias", out),
        ]
        pads = [size // 2] * 4
        return self.add("Conv", names, output, kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads)

    def model(self, inputs: Sequence[int | str], outputs: Sequence[int | str]) -> Model:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes,
            "gpu_day",
            [helper.make_tensor_value_info("x", kind, inputs)],
            [helper.make_tensor_value_info("y", kind, outputs)],
            [numpy_helper.from_array(values, name) for name, values in self.weights.items()],
        )
        return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10))


def three_layers(dtype: str = "float32", batch: int | str = 1) -> Model:
    """Two convolutions with Relu and a linear layer, from ``x`` of (batch, 16, 32, 32) to ``y`` of (batch, 32)."""
    net = _Net(dtype)
    first = net.add("Relu", [net.conv("x", "conv1", 16, 32)], "relu1")
    second = net.add("Relu", [net.conv(first, "conv2", 32, 32)], "relu2")
    flat = net.add("Flatten", [net.add("GlobalAveragePool", [second], "pool")], "flat")
    net.add("Gemm", [flat, net.weight("fc.weight", 32, 32), net.weight("fc.bias", 32)], "y")
    return net.model((batch, *IMAGE[1:]), (batch, 32))


def quantized_three_layers(formats: Sequence[str], dtype: str = "float32") -> Model:
    """`three_layers` with its layers in these formats, one after the other, each with pairs on both inputs."""
    model = three_layers(dtype)
    sites = []
    for number, layer in enumerate(("conv1", "conv2", "y")):
        node, name = model.by_name[layer], formats[number % len(formats)]
        sites.append(_activation(node.inputs[0], [(layer, 0)], name))
        sites.append(_weight(node.inputs[1], layer, name, axis=1 if layer == "y" else 0))
    return _with_pairs(model, sites)


def linear(number_format: str) -> Model:
    """Two MatMuls of 256 by 256 with a Relu between; weights in blocks, and activations if the format has them."""
    net = _Net()
    inner = net.add("Relu", [net.add("MatMul", ["x", net.weight("w1", 256, 256)], "mul1")], "relu")
    net.add("MatMul", [inner, net.weight("w2", 256, 256)], "y")
    model = net.model(ROWS, ROWS)
    sites = []
    for layer in ("mul1", "y"):
        node = model.by_name[layer]
        sites.append(_weight(node.inputs[1], layer, number_format, axis=0))
        if number_format != "int4":  # for weights alone
            sites.append(_activation(node.inputs[0], [(layer, 0)], number_format, axis=1))
    return _with_pairs(model, sites)


def resnet18(placement: str) -> Model:
    """ResNet-18 in float16 for a batch of 32, with one of `PLACEMENTS` in int8.

    They are those that NVIDIA recorded on an A100: none; inputs and weights of the convolutions; the residual inputs
    of the additions too; the input of the global average pooling too.
    """
    net = _Net("float16")
    tensor = net.add("Relu", [net.conv("x", "conv1", 3, 64, 7, 2)], "relu1")
    tensor = net.add("MaxPool", [tensor], "pool1", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    into, residuals = 64, []
    for stage, width in enumerate(_STAGES):
        for block in range(2):
            stride = 2 if stage and not block else 1
            name = f"layer{stage + 1}.{block}"
            inner = net.add(
                "Relu", [net.conv(tensor, f"{name}.conv1", into, width, 3, stride)], f"{name}.relu1"
            )
            left = net.conv(inner, f"{name}.conv2", width, width)
            skip = net.conv(tensor, f"{name}.down", into, width, 1, stride) if into != width else tensor
            net.add("Add", [left, skip], f"{name}.add")
            residuals.append(f"{name}.add")
            tensor, into = net.add("Relu", [f"{name}.add"], f"{name}.relu2"), width
    flat = net.add("Flatten", [net.add("GlobalAveragePool", [tensor], "gap")], "flat")
    net.add("Gemm", [flat, net.weight("fc.weight", 512, 1000), net.weight("fc.bias", 1000)], "y")
    model = net.model(RESNET_INPUT, (32, 1000))
    if placement == "fp16":
        return model
    ends = [(node.name, 0) for node in model.nodes if node.op_type == "Conv"]
    if placement != "qat":
        ends += [(name, 1) for name in residuals]
    if placement == "residual-qgap":
        ends.append(("gap", 0))
    read: dict[str, list[tuple[str, int]]] = {}
    for name, slot in ends:
        read.setdefault(model.by_name[name].inputs[slot], []).append((name, slot))
    sites = [_activation(tensor, consumers, "int8") for tensor, consumers in read.items()]
    sites += [
        _weight(node.inputs[1], node.name, "int8", axis=0) for node in model.nodes if node.op_type == "Conv"
    ]
    return _with_pairs(model, sites)


def write_large(path: Path, size_mib: int) -> None:
    """Write a chain of MatMuls in float16 whose weights take ``size_mib``, in one file of external data."""
    import onnx
    from onnx.external_data_helper import set_external_data

    rows = min(_SIDE, max(32, int((size_mib << 18) ** 0.5)))  # at least two weights
    each = 2 * rows * rows
    count = -(-(size_mib << 20) // each)
    random, tensors, nodes = np.random.default_rng(0), [], []
    with path.with_suffix(".weights").open("wb") as file:
        for number in range(count):
            values = random.standard_normal((rows, rows), np.float32)
            file.write((values / rows**0.5).astype(np.float16).tobytes())
            tensor = TensorProto(
                name=f"w{number}", dims=(rows, rows), data_type=TensorProto.FLOAT16, raw_data=b"-"
            )
            set_external_data(tensor, f"{path.stem}.weights", offset=number * each, length=each)
            tensor.ClearField("raw_data")
            tensors.append(tensor)
            ends = [f"t{number}" if number else "x", "y" if number == count - 1 else f"t{number + 1}"]
            nodes.append(helper.make_node("MatMul", [ends[0], tensor.name], [ends[1]], f"mul{number}"))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, (1, rows)) for name in "xy"]
    graph = helper.make_graph(nodes, "large", ports[:1], ports[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10), path)


def feeds_for(model: Model, shape: Sequence[int] = ()) -> dict[str, Array]:
    """Random values for the input ``x``; ``shape`` if the model's has dynamic dimensions."""
    (port,) = model.proto.graph.input
    dims = tuple(shape) or tuple(dim.dim_value for dim in port.type.tensor_type.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
    return {port.name: np.random.default_rng(1).uniform(-1, 1, dims).astype(dtype)}


def _activation(
    tensor: str, consumers: Iterable[tuple[str, int]], name: str, axis: int | None = None
) -> Site:
    return Site(tensor=tensor, consumers=tuple(Consumer(*end) for end in consumers), format=name, axis=axis)


def _weight(tensor: str, node: str, name: str, axis: int) -> Site:
    return Site(tensor=tensor, consumers=(Consumer(node, 1),), format=name, axis=axis, weight=True)


def _with_pairs(model: Model, sites: Sequence[Site]) -> Model:
    ranges = {site.tensor: _RANGE for site in sites if not site.weight}
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), Quantizer(model, ranges)).proto)
