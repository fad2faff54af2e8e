"""Lint rules for Qualcomm's HTP, ids ``QNN001`` and so on; importing the module registers them.

All were measured with the emulator of onnxruntime-qnn 2.7.0 (QAIRT 2.51.0), and are verified against the installed one
in ``tests/unit/backends/test_qnn.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from qdqspec.graph import Node
from qdqspec.qdq.lint import Hit, QdqNumbers, View, severities, type_name

_MEASURED = "measured, emulator of QAIRT 2.51.0"
_CLIPPING = ("Clip", "Relu")

refused, slow, _ = severities("onnxruntime-qnn-htp-emulator")


@refused(
    "QNN001",
    "A dimension of an input has no size: all nodes run on the CPU, without a message",
    cure="export the model with fixed shapes, or give inputs.shapes",
    source=f"{_MEASURED}: a symbolic batch leaves no node to the NPU",
)
def open_shapes(view: View) -> Iterator[Hit]:
    """The first reader of each input that has a dimension without a size."""
    for value in view.model.proto.graph.input:
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        readers = view.readers(value.name)
        if value.name in view.model.inputs and min(sizes, default=1) < 1 and readers:
            yield readers[0], f"reads '{value.name}' of an open shape"


@slow(
    "QNN002",
    "Data and result of a convolution or product are of different types: it runs in float",
    cure="quantize both to uint8",
    source=f"{_MEASURED}: Conv of uint8 with a result in int8 or uint16, and the reverse",
)
def two_types(view: View) -> Iterator[Hit]:
    """A linear operator whose data is quantized to another type than the result."""
    for node in view.of("Conv", "Gemm", "MatMul"):
        before = view.dequantizer(node.inputs[0])
        after = view.quantizers(view.fused(node, _CLIPPING)[-1].outputs[0])
        if before is None or not after or not _is_quantized(view, node):
            continue
        read, given = (view.numbers(pair).elem_type for pair in (before, after[0]))
        if read != given:
            yield node, f"reads {type_name(read)} and gives {type_name(given)}"


@slow(
    "QNN003",
    "The data of a convolution is quantized and its result is not: it runs in float",
    cure="quantize the result too, after a Relu or Clip that follows",
    source=f"{_MEASURED}: 13 of 15 convolutions of a model with pairs on inputs only",
)
def float_results(view: View) -> Iterator[Hit]:
    """A Conv with quantized data and weight, and a reader of its result that reads floats."""
    for node in view.of("Conv", "ConvTranspose"):
        end = view.fused(node, _CLIPPING)[-1]
        if _is_quantized(view, node) and not view.only_quantized(end.outputs[0]):
            yield node, f"gives '{end.outputs[0]}' in float"


@refused(
    "QNN004",
    "A Softmax has a signed result with zero point 0: half of its steps are lost, and the NPU computes other values",
    cure="quantize its result to uint8 with zero point 0",
    source=f"{_MEASURED}: -17 to -26 dB for one Softmax, -40 dB for SqueezeNet",
)
def signed_softmax(view: View) -> Iterator[Hit]:
    """A Softmax whose result is quantized to int8 or int16 symmetrically."""
    for node in view.of("Softmax"):
        for quantizer in view.quantizers(node.outputs[0]):
            numbers = view.numbers(quantizer)
            if numbers.elem_type in (TensorProto.INT8, TensorProto.INT16) and not _zero(numbers).any():
                yield node, f"is quantized to {type_name(numbers.elem_type)} with zero point 0"


@refused(
    "QNN005",
    "A pair between an operator and a Clip has a wider range than the Clip: the compiler loses the bound",
    cure="leave that pair out: the Clip is computed with the operator before it",
    source=f"{_MEASURED}: -0.1 dB for a Clip of 0 to 6 behind a range of -6 to 6; onnxruntime-qnn pull request 478",
)
def pair_before_clip(view: View) -> Iterator[Hit]:
    """A Clip that reads a pair behind a linear operator, and clips what the pair can represent."""
    for node in view.of("Clip"):
        pair = view.dequantizer(node.inputs[0])
        maker = None if pair is None else view.model.producer.get(view.before_pair(node.inputs[0]))
        bounds = [view.model.array(name).item() for name in node.inputs[1:3] if name in view.model.constants]
        if pair is None or maker is None or len(bounds) < 2:
            continue
        low, high = _range(view.numbers(pair))
        if maker.op_type in ("Conv", "Gemm", "MatMul") and (low < bounds[0] or high > bounds[1]):
            yield node, f"clips {low:.4g} to {high:.4g}, the range of '{pair.name}'"


@refused(
    "QNN006",
    "A LayerNormalization has a scale of another type than its data and an int32 bias: it runs on the CPU",
    cure="leave it in float, or store its scale in the type of its data",
    source=f"{_MEASURED}: uint8 data with an int8 scale and an int32 bias, and the reverse; 18 partitions in ConvNeXt",
)
def layer_normalizations(view: View) -> Iterator[Hit]:
    """A LayerNormalization between pairs whose scale has another type than its data."""
    for node in view.of("LayerNormalization"):
        data, scale, bias = ([*map(view.dequantizer, node.inputs[:3]), None, None, None])[:3]
        if data is None or scale is None or bias is None:
            continue
        types = [view.numbers(each).elem_type for each in (data, scale, bias)]
        if types[2] == TensorProto.INT32 and types[0] != types[1]:
            yield node, f"has data in {type_name(types[0])} and a scale in {type_name(types[1])}"


@refused(
    "QNN007",
    "A signed weight has zero points other than 0, one a channel: the model does not build",
    cure="store signed weights with zero point 0",
    source=f"{_MEASURED}: session creation fails for Conv",
)
def weights_with_zero_points(view: View) -> Iterator[Hit]:
    """A linear operator with a signed weight per channel and differing zero points."""
    for node, dequantizer in view.quantized_weights():
        numbers = view.numbers(dequantizer)
        count = len(np.unique(_zero(numbers)))
        if numbers.elem_type == TensorProto.INT8 and numbers.channel_scales and count > 1:
            yield node, f"has a weight with {count} zero points"


def _is_quantized(view: View, node: Node) -> bool:
    return view.dequantizer(node.inputs[0]) is not None and view.weight_dequantizer(node) is not None


def _zero(numbers: QdqNumbers) -> np.ndarray:
    return np.zeros(1) if numbers.zero_point is None else np.atleast_1d(numbers.zero_point)


def _range(numbers: QdqNumbers) -> tuple[float, float]:
    """The real numbers that a pair with one scale represents; infinite if it is not known."""
    limits = numbers.limits
    if numbers.scale is None or numbers.scale.size != 1 or limits is None:
        return -np.inf, np.inf
    scale, zero = float(numbers.scale.item()), float(_zero(numbers)[0])
    return scale * (limits[0] - zero), scale * (limits[1] - zero)
