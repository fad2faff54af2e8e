"""Lint rules for OpenVINO's CPU plugin, ids ``OVC001`` and so on; importing the module registers them.

All rules were found by building small models with OpenVINO 2026.4.1 on x86-64, and are verified against the installed
version in ``tests/unit/lint/test_openvino.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from qdqspec.backends.openvino.engine import ABSORBED, LABELS
from qdqspec.graph import Node
from qdqspec.qdq.lint import Hit, View, interpolates, severities, type_name

_MEASURED = "measured, OpenVINO 2026.4.1"
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_CHANNELS = 1  # the axis
_EIGHT_BITS = frozenset({TensorProto.INT8, TensorProto.UINT8})

refused, slow, note = severities("openvino-cpu")


@refused(
    "OVC001",
    "A constant behind a pair is added to or multiplied by quantized data: the model does not compile",
    cure="leave this constant in float",
    source=f"{_MEASURED}: AddTransformation and MultiplyPartialTransformation fail with \"index '0' out of range\"",
)
def quantized_constants(view: View) -> Iterator[Hit]:
    """An Add, Mul, or Sub with the constant first; not of a constant with one value, or one a channel of an image."""
    for node in view.of("Add", "Mul", "Sub"):
        made = [view.dequantizer(tensor) for tensor in node.inputs]
        stored = [None if dq is None else _constant_of(view, dq) for dq in made]
        if None in made or (stored[0] is None) == (stored[1] is None):
            continue
        index = 0 if stored[0] is not None else 1
        if node.op_type == "Sub" and index == 1:
            continue
        dims = tuple(view.model.constants[stored[index] or ""].dims)
        shape = view.model.shape(node.outputs[0])
        if shape is None or int(np.prod(dims)) <= 1:
            continue
        rank = len(shape)
        varies = [axis + rank - len(dims) for axis, size in enumerate(dims) if size > 1]
        is_per_channel = rank > 2 and varies == [_CHANNELS]  # of data that no convolution makes
        if not is_per_channel or view.convolution_behind(node.inputs[1 - index]) is not None:
            yield node, f"reads '{node.inputs[index]}', a constant of shape {list(dims)}"


def _constant_of(view: View, dequantizer: Node) -> str | None:
    """The constant that a pair, or the DQ of stored integers, represents."""
    stored, tensor = view.stored_weight(dequantizer), view.before_pair(dequantizer.outputs[0])
    return stored or (tensor if tensor in view.model.constants else None)


@slow(
    "OVC010",
    "A weight is not int8 with zero point 0: its operator runs in float",
    cure="store weights as int8 with zero point 0, of 7 bits where the processor has no VNNI",
    source=f"{_MEASURED}: Conv with uint8 weights, with a zero point of 3, in 16 bits",
)
def odd_weights(view: View) -> Iterator[Hit]:
    """A Conv of quantized data whose weight has another type or a zero point."""
    for node, weight in view.quantized_weights("Conv"):
        if view.dequantizer(node.inputs[0]) is None:
            continue
        numbers = view.numbers(weight)
        if numbers.elem_type != TensorProto.INT8:
            yield node, f"has a weight of {type_name(numbers.elem_type)}"
        elif numbers.zero_point is not None and np.any(numbers.zero_point):
            yield node, "has a weight with a zero point"


@slow(
    "OVC011",
    "Pairs of other types than int8 and uint8: the operators around them run in float",
    cure="choose uint8 for activations and int8 for weights",
    source=f"{_MEASURED}: Conv between pairs of uint16 and int16",
)
def other_types(view: View) -> Iterator[Hit]:
    """Each activation that is quantized to another type."""
    for node, numbers in view.heads:
        if not view.quantizes_constant(node) and numbers.elem_type not in _EIGHT_BITS:
            yield node, f"quantizes '{node.inputs[0]}' to {type_name(numbers.elem_type)}"


@slow(
    "OVC012",
    "The data is quantized and the weight is not: the operator runs in float",
    cure="quantize the weight too, or leave the data in float",
    source=_MEASURED,
)
def float_weights(view: View) -> Iterator[Hit]:
    """A Conv, Gemm or MatMul of quantized data with a float constant."""
    for node in view.of(*_PRODUCTS):
        if node.inputs[1] in view.model.constants and view.dequantizer(node.inputs[0]) is not None:
            yield node, f"has a float weight '{node.inputs[1]}'"


@slow(
    "OVC013",
    "A product of two activations runs in float, with a dequantization of both",
    cure="leave its inputs in float",
    source=_MEASURED,
)
def two_activations(view: View) -> Iterator[Hit]:
    """A MatMul of two quantized activations."""
    for node in view.of("MatMul"):
        made = [view.dequantizer(tensor) for tensor in node.inputs[:2]]
        if all(dq is not None and _constant_of(view, dq) is None for dq in made):
            yield node, "multiplies two quantized activations"


@slow(
    "OVC014",
    "One side of a sum is quantized and the other is not: the sum is a separate float kernel",
    cure="quantize both sides: the sum is computed in the kernel of a convolution then; or neither",
    source=_MEASURED,
)
def one_sided_sums(view: View) -> Iterator[Hit]:
    """An Add or Sub of two activations with a convolution on the float side, whose result is quantized."""
    for node in view.of("Add", "Sub"):
        if not view.only_quantized(node.outputs[0]):
            continue
        bare = [tensor for tensor in node.inputs if view.dequantizer(tensor) is None]
        if len(bare) == 1 and view.convolution_behind(bare[0]) is not None:
            yield node, f"reads '{bare[0]}' in float"


@slow(
    "OVC015",
    "An operator without an integer kernel is between pairs: it runs in float, and each pair may be a conversion",
    cure="leave it in float, together with its neighbours where they are small",
    source=f"{_MEASURED}: ConvTranspose, Pad, Softmax, Tile, GatherElements, Resize that interpolates, and others",
)
def no_integer_kernel(view: View) -> Iterator[Hit]:
    """An operator that is neither in the table of operators nor fused, between a pair and a quantized result."""
    for node in view.operators:
        fits = node.op_type in LABELS and not interpolates(node)
        if fits or node.op_type in ABSORBED or not node.inputs or not node.outputs:
            continue
        if view.dequantizer(node.inputs[0]) is not None and view.only_quantized(node.outputs[0]):
            yield node, f"is a {node.op_type}"


@note(
    "OVC016",
    "Activations are int8: results differ from the arithmetic of ONNX on processors without VNNI",
    cure="quantize activations to uint8, with any zero point",
    source=f"{_MEASURED}, AVX2: SQNR of squeezenet's outputs 9.3 dB with int8 activations, 35.9 with uint8",
)
def signed_activations(view: View) -> Iterator[Hit]:
    """Each activation that is quantized to int8."""
    for node, numbers in view.heads:
        if not view.quantizes_constant(node) and numbers.elem_type == TensorProto.INT8:
            yield node, f"quantizes '{node.inputs[0]}'"
