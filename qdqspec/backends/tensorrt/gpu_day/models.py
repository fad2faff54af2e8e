"""The models of a GPU day: small ones in each format, ResNet-18 with four placements, a large and rejected ones.

Weights are random: these models answer whether a format builds and how long it takes, not how accurate it is.

Each lint rule of what the parser refuses has one small model, which is parsed, not built. It breaks the rule in
the versions that the rule applies to. The answer of another version's parser shows whether the rule's range of
versions is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from qdqspec.arrays import Array
from qdqspec.graph.model import Model
from qdqspec.placement.edit.insert import insert_qdq
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site

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


F32 = np.float32
_ROWS = "float[4,16] x"
_IMAGE = "float[1,16,8,8] x"
_HALVES = "float16[4,16] x"
_SQUARES = "float[16,16] x, float[16,16] k"
_PAIR = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z) "
_WEIGHT = "v = DequantizeLinear<axis = 0>(w, ws, wz) "
_WIDE = _PAIR.replace("zeLinear(q", "zeLinear<output_dtype = 10>(q") + "n = Neg(a)  y = Cast<to = 1>(n)"
_BLOCKS = "v = DequantizeLinear<axis = 0, block_size = {0}>(h, t)  y = MatMul(x, v)"
_MXFP8 = (
    "q, e = trt.TRT_MXFP8DynamicQuantize<axis = -1, block_size = 32, output_dtype = 17>(x) "
    "a = trt.TRT_MXFP8DequantizeLinear<axis = -1, block_size = 32, output_dtype = 1>(q, e)  y = Neg(a)"
)
_CONSTANTS: Mapping[str, Array] = {
    "s": np.array(0.05, F32), "z": np.array(0, np.int8), "zu": np.array(128, np.uint8), "z0": np.array(0, np.uint8),
    "w": np.ones((16, 16, 3, 3), np.int8), "ws": np.full(16, 0.01, F32), "wz": np.zeros(16, np.int8),
    "m": np.ones((16, 16), np.int8), "b": np.zeros(16, F32), "bi": np.arange(16, dtype=np.int32),
    "bs": np.full(16, 0.0005, F32),
}  # fmt: skip
_FP8_ZERO = np.zeros((), ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Refused:
    """A model as ONNX text; ``constants`` are added to those that all may name."""

    inputs: str
    nodes: str
    constants: Mapping[str, Array] = field(default_factory=dict)
    opset: int = 21

    def model(self) -> Model:
        """The model, every node named after its output."""
        head = f'<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1, "trt": 1]>'
        proto = onnx.parser.parse_model(f"{head} g ({self.inputs}) => (float y) {{ {self.nodes} }}")
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        read = {name for node in proto.graph.node for name in node.input}
        known = {**_CONSTANTS, **self.constants}
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(known[name]), name) for name in sorted(read & known.keys())
        )
        proto.ir_version = 10 if self.opset < 23 else 11
        used = {node.domain for node in proto.graph.node} | {""}
        kept = [each for each in proto.opset_import if each.domain in used]
        del proto.opset_import[:]
        proto.opset_import.extend(kept)
        for node in proto.graph.node:
            node.name = node.output[0]
        return Model(proto)


# By rule. Rules on the GPU's compute capability have none: they do not concern the parser.
REFUSED: Mapping[str, Refused] = {
    "TRT001": Refused(_ROWS, "q = QuantizeLinear(x, s, zu)  a = DequantizeLinear(q, s, zu)  y = Neg(a)"),
    "TRT002": Refused(
        _IMAGE, _PAIR + _WEIGHT + "y = Conv<pads = [1, 1, 1, 1]>(a, v)",
        {"ws": np.r_[np.full(15, 0.01), 0].astype(F32)},
    ),
    "TRT003": Refused(
        _ROWS + ", float t", "q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)  y = Neg(a)"
    ),
    "TRT004": Refused(_IMAGE, _PAIR + _WEIGHT + "d = DequantizeLinear<axis = 0>(bi, bs)  y = Conv(a, v, d)"),
    "TRT005": Refused(_ROWS, _PAIR + "y = Neg(a)", {"z": np.array(0, np.int16)}),
    "TRT006": Refused(_ROWS, "q = QuantizeLinear(x, s, z0)  a = DequantizeLinear(q, s, z0)  y = Neg(a)"),
    "TRT007": Refused(_ROWS, "q = QuantizeLinear(x, ws, wz)  a = DequantizeLinear(q, ws, wz)  y = Neg(a)"),
    "TRT008": Refused(_IMAGE, _PAIR + _WEIGHT.replace("axis = 0", "axis = 1") + "y = Conv(a, v)"),
    "TRT009": Refused(_HALVES, _WIDE, opset=23),
    "TRT010": Refused(
        _ROWS, "v = DequantizeLinear<axis = 0, block_size = 8>(m, t, u)  y = MatMul(x, v)",
        {"t": np.ones((2, 16), F32), "u": np.zeros((2, 16), np.int8)},
    ),
    "TRT011": Refused(_ROWS, "q = QuantizeLinear(x, s, z)  i = MatMulInteger(q, m)  y = Cast<to = 1>(i)"),
    "TRT012": Refused(
        _ROWS, _PAIR.replace("= Q", "= com.microsoft.Q").replace("= D", "= com.microsoft.D") + "y = Neg(a)"
    ),
    "TRT013": Refused(_ROWS, "q = QuantizeLinear(x, s, wz)  a = DequantizeLinear(q, s, wz)  y = Neg(a)"),
    "TRT014": Refused(_ROWS, _PAIR + "v = DequantizeLinear(m, ws, wz)  y = MatMul(a, v)"),
    "TRT015": Refused(
        _ROWS, _BLOCKS.format(8),
        {"t": np.ones((2, 16)).astype(ml_dtypes.float8_e8m0fnu),
         "h": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn)},
    ),
    "TRT016": Refused(
        "float[4,128] x", _BLOCKS.format(32),
        {"t": np.ones((4, 16), F32), "h": np.zeros((128, 16), np.int8).astype(ml_dtypes.int4)},
    ),
    "TRT017": Refused(_ROWS, _PAIR + "y = Transpose(a)", {"z": _FP8_ZERO}, opset=18),
    "TRT018": Refused(
        _ROWS + ", int8 t", "q = QuantizeLinear(x, s, t)  a = DequantizeLinear(q, s, t)  y = Neg(a)"
    ),
    "TRT019": Refused(
        _ROWS, _PAIR.replace("zeLinear(q", "zeLinear<output_dtype = 1>(q") + "y = Neg(a)",
        {"s": np.array(0.05, np.float16)}, opset=23,
    ),
    "TRT023": Refused(_ROWS, _WIDE, opset=23),
    "TRT025": Refused("float[4,4] x", "y = Det(x)"),
    "TRT026": Refused("float[1,2,4,8] x", "y = Attention(x, x, x)", opset=23),
    "TRT027": Refused(_ROWS, "y = RMSNormalization(x, b)", opset=23),
    "TRT028": Refused(_ROWS, "y = Swish(x)", opset=24),
    "TRT029": Refused(_SQUARES, "y = com.microsoft.FusedMatMul(x, k)"),
    "TRT060": Refused("float[2,3,4,64] x", _MXFP8),
}  # fmt: skip
