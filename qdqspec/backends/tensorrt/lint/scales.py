"""Rules for scales that TensorRT's ONNX parser rejects or reads differently.

Sources: the onnx-tensorrt parser and NvInfer.h. None was measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import (
    HEADER,
    HEADER_BEFORE,
    HEADER_SINCE,
    MODEL_OPTIMIZER,
    NEW_PARSER,
    PARSER,
    rule,
)
from qdqspec.graph.model import Node
from qdqspec.graph.ops import FLOATS
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import View, type_name
from qdqspec.placement.ops import WEIGHT_AXES

_CASTS_BELOW = 19  # the opset below which the parser casts the scale of a Q to the type of the data


@rule(
    "TRT002",
    "refused",
    "A scale is zero, negative or not finite",
    cure="clamp scales to a small positive number; a channel of zero weights gets a scale of 0 from some tools",
    source=f'{PARSER} ("Scale coefficients must all be positive")',
)
def positive_scales(view: View) -> Iterator[Hit]:
    """Any element of a constant scale that is not above 0; infinities and NaN too."""
    for node in view.heads:
        scale = view.numbers(node).scale
        if scale is None:
            continue
        count = int(scale.size - ((scale > 0) & (scale < float("inf"))).sum())
        if not scale.size:
            yield Hit(node.name, "has an empty scale")
        elif count:
            yield Hit(node.name, f"has {count} of {scale.size} such scales")


@rule(
    "TRT007",
    "refused",
    "An activation has one scale a channel",
    cure="give activations one scale a tensor; only weights take several",
    source=f"{HEADER}: per-channel scales are for weights",
)
def activations_per_channel(view: View) -> Iterator[Hit]:
    """More than one scale, without blocks, on a tensor that is not constant."""
    for node in view.heads:
        numbers = view.numbers(node)
        several = numbers.scale is not None and numbers.scale.size > 1 and not numbers.block
        if several and numbers.scale is not None and not view.quantizes_constant(node):
            yield Hit(node.name, f"has {numbers.scale.size} scales on axis {numbers.axis}")


@rule(
    "TRT008",
    "refused",
    "The scales of a weight do not lie along its output channels",
    cure="quantize Conv weights on axis 0, ConvTranspose on 1, Gemm and MatMul on the axis of the output",
    source=f'{PARSER} ("The number of scales is not equal to the number of output channels")',
)
def weight_axes(view: View) -> Iterator[Hit]:
    """Several scales, without blocks, along an axis other than the output channels, or not one per channel."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node)
        if dequantizer is None:
            continue
        numbers, wanted = view.numbers(dequantizer), _output_axis(view, node, dequantizer)
        dims = view.weight_dims(node)
        if numbers.scale is None or numbers.scale.size < 2 or numbers.block or wanted is None or not dims:
            continue
        axis = numbers.axis % len(dims)
        if axis != wanted:
            yield Hit(dequantizer.name, f"is quantized on axis {axis}, {node.op_type} wants {wanted}")
        elif numbers.scale.size != dims[axis]:
            yield Hit(dequantizer.name, f"has {numbers.scale.size} scales for {dims[axis]} channels")


def _output_axis(view: View, node: Node, dequantizer: Node) -> int | None:
    rank = len(view.model.constants[view.stored_weight(dequantizer) or ""].dims)
    if node.op_type == "Gemm":
        return 0 if node.attributes.get("transB", 0) else 1
    return WEIGHT_AXES.get(node.op_type, rank - 1)


@rule(
    "TRT009",
    "refused",
    "The scale's type is not the type of the data",
    cure="convert scales together with the model: float16 models need float16 scales",
    source=f"{HEADER_BEFORE}: in a strongly typed network float16 data with a float32 scale is a type error",
    until="10.13",
)
def scale_types(view: View) -> Iterator[Hit]:
    """A Q of one float type with a scale of another; ONNX allows it from opset 23, the parser casts it below 19."""
    for node, data, scale in _mismatched(view):
        yield Hit(node.name, f"quantizes {type_name(data)} by a scale of {type_name(scale)}")


@rule(
    "TRT019",
    "refused",
    "A scale is half-precision, and the data is of another type",
    cure="store the scale in the type of the data, or in float32",
    source=f"{HEADER_SINCE}: a scale of float16 or bfloat16 must match the input, one of float32 need not",
    since="10.13",
)
def half_scales(view: View) -> Iterator[Hit]:
    """A Q of one float type with a float16 or bfloat16 scale of another."""
    for node, data, scale in _mismatched(view):
        if scale != TensorProto.FLOAT:
            yield Hit(node.name, f"quantizes {type_name(data)} by a scale of {type_name(scale)}")


def _mismatched(view: View) -> Iterator[tuple[Node, int, int]]:
    """Each Q whose data and scale have different float types, which the parser does not cast."""
    for node in view.plain_pairs:
        if node.op_type != "QuantizeLinear" or view.model.opset < _CASTS_BELOW:
            continue
        data, scale = view.model.elem_type(node.inputs[0]), view.model.elem_type(node.inputs[1])
        if data in FLOATS and scale in FLOATS and data is not None and scale is not None and data != scale:
            yield node, data, scale


@rule(
    "TRT023",
    "refused",
    "A DequantizeLinear gives another type than its scale has",
    cure="store the scale in the type that is to come out, or cast behind",
    source=f"{HEADER_BEFORE}: the output has the type of the scale; {NEW_PARSER}: output_dtype decides",
    until="10.15",
    unknown=("10.13", "10.15"),
)
def dequantized_types(view: View) -> Iterator[Hit]:
    """A DQ whose output has another float type than its scale; ONNX allows it from opset 23 on."""
    for node in view.plain_pairs:
        given, scale = view.model.elem_type(node.outputs[0]), view.model.elem_type(node.inputs[1])
        if node.op_type == "DequantizeLinear" and given in FLOATS and scale in FLOATS and given != scale:
            yield Hit(node.name, f"gives {type_name(given)} by a scale of {type_name(scale)}")


@rule(
    "TRT013",
    "refused",
    "Scale and zero point are not of one size",
    cure="give a pair as many zero points as scales, or none",
    source=f'{PARSER} ("The scale and zero point must have the same volume")',
)
def sizes_of_zero_points(view: View) -> Iterator[Hit]:
    """Constant zero points with another number of elements; a scalar and a single element are equivalent."""
    for node in view.pairs:
        scale, zero_point = view.numbers(node).scale, view.numbers(node).zero_point
        if scale is not None and zero_point is not None and scale.size != zero_point.size:
            yield Hit(node.name, f"has {scale.size} scales and {zero_point.size} zero points")


@rule(
    "TRT014",
    "refused",
    "Several scales, and no axis is named: TensorRT takes the first axis, ONNX the second",
    cure="name the axis: attribute axis of QuantizeLinear and DequantizeLinear",
    source=f"{PARSER} 10.1 and 10.6: without the attribute the axis is 0; {NEW_PARSER}: it is ONNX's default, 1",
    until="10.15",
    unknown=("10.7", "10.15"),
)
def unnamed_axes(view: View) -> Iterator[Hit]:
    """One scale per channel on a node without the attribute; square weights are built with wrong scales."""
    for node in view.pairs:
        numbers = view.numbers(node)
        several = numbers.scale is not None and numbers.scale.size > 1 and not numbers.block
        if several and "axis" not in node.attributes:
            yield Hit(node.name, f"has {0 if numbers.scale is None else numbers.scale.size} scales")


@rule(
    "TRT015",
    "refused",
    "A scale is not stored in float32, float16 or bfloat16",
    cure="store scales as floats; for MXFP8 take TRT_MXFP8DequantizeLinear of domain trt, as Model-Optimizer does",
    source=f'{PARSER} 10.1: other types are not looked into ("Scale coefficients must all be positive"); '
    f"{MODEL_OPTIMIZER}, mxfp8_exporter",
)
def types_of_scales(view: View) -> Iterator[Hit]:
    """Scales in ONNX's power-of-two type (E8M0, opset 24) or any other type, if it is known."""
    for node in view.plain_pairs:
        scale = view.model.elem_type(node.inputs[1])
        if scale not in (None, TensorProto.UNDEFINED) and scale not in FLOATS:
            yield Hit(node.name, f"has a scale of {type_name(scale)}")
