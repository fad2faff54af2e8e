"""What TensorRT's ONNX parser does not take: numbers, types and operators. May import floors 0 to 2, numpy, this room.

Sources: NvInfer.h of TensorRT 11.1 (quantize and dequantize layers), the onnx-tensorrt parser, its operator table,
and NVIDIA's "Working with Quantized Types". None of it was measured by us.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.graph.model import Node
from qdqspec.graph.ops import FLOATS
from qdqspec.lint.rules import Hit, rule
from qdqspec.lint.view import View, type_name
from qdqspec.placement.ops import WEIGHT_AXES

_PARSER = "onnx-tensorrt, helpers of QuantizeLinear and DequantizeLinear"
_HEADER = "NvInfer.h, IQuantizeLayer and IDequantizeLayer"
_TAKEN = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1}
)
_BLOCKED = frozenset({TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1})
_FOUR_BITS = frozenset({TensorProto.INT4, TensorProto.FLOAT4E2M1})
_INTEGER_KERNELS = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)


@rule(
    "TRT001",
    "refused",
    "The zero point is not zero: TensorRT quantizes symmetrically only",
    cure="quantize again with zero points of 0, that is with int8 activations in place of asymmetric uint8 ones",
    source=f'{_PARSER} ("the zero point ... must be all zeros"); github.com/NVIDIA/TensorRT issue 2774',
)
def zero_points(view: View) -> Iterator[Hit]:
    """Any element of a constant zero point other than 0; computed ones are TRT003's."""
    for node in view.heads:
        zero_point = view.numbers(node).zero_point
        if zero_point is not None and zero_point.any():
            yield Hit(node.name, f"has zero point {zero_point.flat[abs(zero_point).argmax()]:g}")


@rule(
    "TRT002",
    "refused",
    "A scale is zero, negative or not finite",
    cure="clamp scales to a small positive number; a channel of zero weights gets a scale of 0 from some tools",
    source=f'{_PARSER} ("Scale coefficients must all be positive")',
)
def positive_scales(view: View) -> Iterator[Hit]:
    """Any element of a constant scale that is not above 0; infinities and NaN too."""
    for node in view.heads:
        scale = view.numbers(node).scale
        if scale is not None and (
            scale.size == 0 or not (scale > 0).all() or not (scale < float("inf")).all()
        ):
            count = int(scale.size - (scale > 0).sum())
            yield Hit(
                node.name,
                "has an empty scale" if not scale.size else f"has {count} of {scale.size} such scales",
            )


@rule(
    "TRT003",
    "refused",
    "A scale or zero point is computed when the model runs",
    cure="fold the model (`qdqspec fold`), or export static quantization",
    source=f"{_HEADER}: both must be build-time constants",
)
def computed_numbers(view: View) -> Iterator[Hit]:
    """A scale or zero point that neither is a constant nor dequantized from one."""
    for node in view.heads:
        numbers = view.numbers(node)
        if numbers.scale is None or numbers.zero_point is None:
            yield Hit(node.name, "reads numbers that other nodes make")


@rule(
    "TRT004",
    "refused",
    "A bias is stored as int32 behind a DequantizeLinear",
    cure="keep biases in float, as `qdqspec tune --backend tensorrt` does",
    source=f'{_PARSER} 10.1 ("TensorRT only allows FP8, INT8, and INT4 quantization")',
)
def integer_biases(view: View) -> Iterator[Hit]:
    """A DequantizeLinear of int32."""
    for node in view.dequantizers:
        if view.numbers(node).elem_type == TensorProto.INT32:
            yield Hit(node.name, f"dequantizes int32 '{node.inputs[0]}'")


@rule(
    "TRT005",
    "refused",
    "The number format is none of int8, fp8 (e4m3), int4 and fp4 (e2m1)",
    cure="choose one of these formats",
    source=f'{_PARSER} ("TensorRT only allows FP8, INT8, and INT4 quantization"); {_HEADER} for fp4',
)
def formats(view: View) -> Iterator[Hit]:
    """Stored numbers of another type; int32 is TRT004's, uint8 TRT006's."""
    for node in view.heads:
        elem_type = view.numbers(node).elem_type
        if elem_type is not None and elem_type not in _TAKEN | {TensorProto.INT32}:
            yield Hit(node.name, f"is {type_name(elem_type)}")


@rule(
    "TRT006",
    "refused",
    "uint8 is read as int8: what lies above 127 is cut off",
    cure="quantize to int8; uint8 and asymmetric numbers are for the DLA only, behind a parser flag",
    source=f"{_PARSER}; OnnxParserFlag.ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA",
)
def unsigned(view: View) -> Iterator[Hit]:
    """uint8 with zero points of 0, which the parser warns of only; with others TRT001 speaks."""
    for node in view.heads:
        numbers = view.numbers(node)
        zero = numbers.zero_point is not None and not numbers.zero_point.any()
        if numbers.elem_type == TensorProto.UINT8 and zero:
            yield Hit(node.name, "is uint8")


@rule(
    "TRT007",
    "refused",
    "An activation has one scale a channel",
    cure="give activations one scale a tensor; only weights take several",
    source=f"{_HEADER}: per-channel scales are for weights",
)
def activations_per_channel(view: View) -> Iterator[Hit]:
    """More than one scale, without blocks, on what is no constant."""
    for node in view.heads:
        numbers = view.numbers(node)
        dequantizes = node.op_type == "DequantizeLinear"
        constant = (
            view.stored_weight(node) is not None if dequantizes else node.inputs[0] in view.model.constants
        )
        if numbers.scale is not None and numbers.scale.size > 1 and not numbers.block and not constant:
            yield Hit(node.name, f"has {numbers.scale.size} scales on axis {numbers.axis}")


@rule(
    "TRT008",
    "refused",
    "The scales of a weight do not lie along its output channels",
    cure="quantize Conv weights on axis 0, ConvTranspose on 1, Gemm and MatMul on the axis of the output",
    source=f'{_PARSER} ("The number of scales is not equal to the number of output channels")',
)
def weight_axes(view: View) -> Iterator[Hit]:
    """Several scales, without blocks, along another axis than the operator's output channels."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node)
        if dequantizer is None:
            continue
        numbers, wanted = view.numbers(dequantizer), _output_axis(view, node, dequantizer)
        if numbers.scale is None or numbers.scale.size < 2 or numbers.block or wanted is None:
            continue
        rank = len(view.model.constants[view.stored_weight(dequantizer) or ""].dims)
        if numbers.axis % rank != wanted:
            yield Hit(
                dequantizer.name, f"is quantized on axis {numbers.axis % rank}, {node.op_type} wants {wanted}"
            )


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
    source=f"{_HEADER}; in a strongly typed network float16 data with a float32 scale is a type error",
)
def scale_types(view: View) -> Iterator[Hit]:
    """A QuantizeLinear of one float type by a scale of another; ONNX allows it from opset 23 on."""
    for node in view.heads:
        if node.op_type != "QuantizeLinear":
            continue
        data, scale = (view.model.elem_type(name) for name in node.inputs[:2])
        if data in FLOATS and scale in FLOATS and data != scale:
            yield Hit(node.name, f"quantizes {type_name(data)} by a scale of {type_name(scale)}")


@rule(
    "TRT010",
    "refused",
    "Blocks lie where TensorRT does not take them",
    cure="use blocks for fp8, int4 and fp4 only, along the last or the last but one axis of a weight",
    source=f"{_HEADER}: one blocking dimension, last or second to last; INT4 needs an even last dimension",
)
def blocks(view: View) -> Iterator[Hit]:
    """Blocks of another format, along another axis, or 4-bit weights with an odd last dimension."""
    for node in view.heads:
        numbers, shape = view.numbers(node), view.model.shape(node.inputs[0])
        if numbers.block and numbers.elem_type not in _BLOCKED:
            yield Hit(node.name, f"has blocks of {numbers.block} of {type_name(numbers.elem_type)}")
        elif numbers.block and shape and numbers.axis % len(shape) < len(shape) - 2:
            yield Hit(node.name, f"has blocks along axis {numbers.axis} of {len(shape)}")
        elif numbers.elem_type in _FOUR_BITS and shape and (shape[-1] or 0) % 2:
            yield Hit(node.name, f"has 4-bit numbers with a last dimension of {shape[-1]}")


@rule(
    "TRT011",
    "refused",
    "An operator that computes in integers itself: TensorRT takes Q/DQ pairs only",
    cure="export QuantizeLinear and DequantizeLinear around float operators (QDQ format, not QOperator)",
    source="onnx-tensorrt, docs/operators.md",
)
def integer_operators(view: View) -> Iterator[Hit]:
    """QLinearConv and its like, and those of ONNX Runtime's domain."""
    for node in view.model.nodes:
        if node.op_type in _INTEGER_KERNELS or (
            node.domain == "com.microsoft" and node.op_type.startswith(("QLinear", "QGemm", "MatMulNBits"))
        ):
            yield Hit(node.name, f"is a {node.op_type}")


@rule(
    "TRT012",
    "refused",
    "A Q or DQ of ONNX Runtime's own domain",
    cure="export with opset 21 or above, where ONNX's own operators take all types",
    source="onnx-tensorrt, docs/operators.md: operators of ONNX and of domain trt",
)
def foreign_pairs(view: View) -> Iterator[Hit]:
    """QuantizeLinear or DequantizeLinear of domain com.microsoft."""
    for node in view.pairs:
        if node.domain == "com.microsoft":
            yield Hit(node.name, f"is {node.domain}.{node.op_type}")
