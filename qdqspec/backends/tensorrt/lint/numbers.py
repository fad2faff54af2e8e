"""Rules for scales, zero points, types and blocks that TensorRT's ONNX parser rejects or reads differently.

Sources: NvInfer.h of TensorRT 11.1 (quantize and dequantize layers), the onnx-tensorrt parser, its operator table,
and NVIDIA's "Working with Quantized Types". None was measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import BUILDS_IN_RTX, MODEL_OPTIMIZER, refused
from qdqspec.graph import Node
from qdqspec.graph.ops import FLOATS
from qdqspec.qdq.lint import Hit, QdqNumbers, View, formats_newer_than_opset, type_name

_PARSER = "onnx-tensorrt, helper of QuantizeLinear and DequantizeLinear"
_HEADER = "NvInfer.h, IQuantizeLayer and IDequantizeLayer"
_HEADER_BEFORE = "NvInfer.h 10.9 to 10.12, IQuantizeLayer and IDequantizeLayer"
_HEADER_SINCE = "NvInfer.h 10.13 to 11.1, IQuantizeLayer and IDequantizeLayer"
_NEW_PARSER = "onnx-tensorrt 10.15, helper of QuantizeLinear and DequantizeLinear"
_OPERATORS = "onnx-tensorrt, docs/operators.md"
_TAKEN = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1}
)
# Blocked formats, and the sizes that their blocks may have.
_BLOCKS: dict[int, tuple[int, ...]] = {
    TensorProto.FLOAT8E4M3FN: (32,),
    TensorProto.INT4: (64, 128),
    TensorProto.FLOAT4E2M1: (16,),
}
_FOUR_BITS = frozenset({TensorProto.INT4, TensorProto.FLOAT4E2M1})
INTEGER_KERNELS = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)


@refused(
    "TRT001",
    "The zero point is not zero: TensorRT quantizes symmetrically only",
    cure="quantize again with zero points of 0, weights too: to int8, not to uint8; `qdqspec tune` does so, from the "
    "quantized model too",
    source=f'{_PARSER} ("the zero point ... must be all zeros"); github.com/NVIDIA/TensorRT issue 2774',
)
def zero_points(view: View) -> Iterator[Hit]:
    """Any element of a constant zero point other than 0; TRT003 reports computed ones."""
    for node, numbers in view.heads:
        zero_point = numbers.zero_point
        if zero_point is not None and zero_point.any():
            yield node, f"has zero point {zero_point.flat[abs(zero_point).argmax()]:g}"


@refused(
    "TRT003",
    "A scale or zero point is computed when the model runs",
    cure="fold the model (`qdqspec fold`), or export static quantization",
    source=f"{_HEADER_BEFORE}: both must be build-time constants",
    until="10.13",
)
def computed_numbers(view: View) -> Iterator[Hit]:
    """A scale or zero point that is neither a constant nor dequantized from one."""
    for node, numbers in view.heads:
        is_known = numbers.scale is not None and numbers.zero_point is not None
        if not is_known or not view.computed.isdisjoint(node.inputs[1:]):
            yield node, "reads numbers that other nodes make"


@refused(
    "TRT018",
    "A zero point is computed when the model runs",
    cure="fold the model (`qdqspec fold`), or leave the zero point out: it must be 0",
    source=f"{_HEADER_SINCE}: the zero point must be a build-time constant, the scale need not",
    since="10.13",
)
def computed_zero_points(view: View) -> Iterator[Hit]:
    """A zero point that is neither a constant nor dequantized from one, with any scale."""
    for node, _ in view.heads:
        zero_point = node.input_at(2)
        if not view.is_given(zero_point):
            yield node, f"reads zero point '{zero_point}', which another node makes"


@refused(
    "TRT004",
    "A bias is stored as int32 behind a DequantizeLinear",
    cure="keep biases in float, as `qdqspec tune --backend tensorrt` does",
    source=f'{_PARSER} 10.1 ("TensorRT only allows FP8, INT8, and INT4 quantization")',
)
def integer_biases(view: View) -> Iterator[Hit]:
    """A DequantizeLinear of int32."""
    for node, numbers in view.dequantizers:
        if numbers.elem_type == TensorProto.INT32:
            yield node, f"dequantizes int32 '{node.inputs[0]}'"


@refused(
    "TRT005",
    "The number format is none of int8, fp8 (e4m3), int4 and fp4 (e2m1)",
    cure="choose one of these formats",
    source=f'{_PARSER} ("TensorRT only allows FP8, INT8, and INT4 quantization"); {_HEADER} for fp4',
)
def formats(view: View) -> Iterator[Hit]:
    """Stored numbers of another type; TRT004 reports int32, TRT006 uint8."""
    for node, numbers in view.heads:
        if numbers.elem_type not in (None, TensorProto.INT32, *_TAKEN):
            yield node, f"is {type_name(numbers.elem_type)}"


refused(
    "TRT017",
    "The model's opset is older than the number format",
    cure="raise the opset: fp8 came with 19, int4 with 21, fp4 with 23",
    source=f"ONNX, QuantizeLinear and DequantizeLinear: types by opset; {BUILDS_IN_RTX}",
)(formats_newer_than_opset)


@refused(
    "TRT006",
    "uint8 is refused, or read as int8, so that values above 127 are clipped",
    cure="quantize to int8; uint8 and asymmetric numbers are for the DLA only, behind a parser flag",
    source=f'{_PARSER} ("Found unsupported input type" in 10.1, a warning in others); '
    "OnnxParserFlag.ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA",
)
def unsigned(view: View) -> Iterator[Hit]:
    """uint8 with zero points of 0, for which the parser only warns; TRT001 reports other zero points."""
    for node, numbers in view.heads:
        zero = numbers.zero_point is not None and not numbers.zero_point.any()
        if numbers.elem_type == TensorProto.UINT8 and zero:
            yield node, "is uint8"


@refused(
    "TRT010",
    "Blocks are along an axis that TensorRT does not support",
    cure="use blocks for fp8, int4 and fp4 only, two or more, and whole ones, along the last or the last but one axis "
    "of a weight; let TensorRT's operators (TRT_FP4DynamicQuantize, TRT_MXFP8DynamicQuantize) find the scales of "
    "activations",
    source=f'{_HEADER}: one blocking dimension, last or second to last; {_PARSER} ("Inferred block size is not an '
    'integer"; "4-bit quantization requires an even number of elements"); measured with TensorRT for RTX 1.7.1.116: '
    '"ScaleMode is illegal" of one block',
)
def blocks(view: View) -> Iterator[Hit]:
    """Blocks of another format or axis, of activations, or that do not divide it; an odd number of 4-bit numbers.

    TRT060 reports dynamically quantized activations.
    """
    for node, numbers in view.heads:
        if numbers.block and not numbers.dynamic and numbers.elem_type not in _BLOCKS:
            yield node, f"has blocks of {numbers.block} of {type_name(numbers.elem_type)}"
        elif numbers.block and not numbers.dynamic and not view.quantizes_constant(node):
            yield node, f"has blocks of {numbers.block} of an activation, with constant scales"
        elif why := _misplaced(view, node, numbers):
            yield node, why


def misplaced_blocks(view: View) -> Iterator[Hit]:
    """Blocks of any format along another axis, or that do not divide it, or one; an odd number of 4-bit numbers."""
    return ((node, why) for node, numbers in view.heads if (why := _misplaced(view, node, numbers)))


def _misplaced(view: View, node: Node, numbers: QdqNumbers) -> str:
    shape = view.model.shape(node.inputs[0])
    if not shape or numbers.dynamic:
        return ""
    axis = numbers.axis % len(shape)
    size = shape[axis]
    if numbers.block and numbers.scale is not None and numbers.scale.size == 1:
        return "has one block"
    if numbers.block and axis < len(shape) - 2:
        return f"has blocks along axis {numbers.axis} of {len(shape)}"
    if numbers.block and size and size % numbers.block:
        return f"has blocks of {numbers.block} along {size} elements"
    if numbers.elem_type in _FOUR_BITS and all((size or 0) % 2 for size in shape):
        return f"has an odd number of 4-bit numbers: {' x '.join(map(str, shape))}"
    return ""


@refused(
    "TRT016",
    "Blocks have a size that no kernel is made for",
    cure="choose blocks of 64 or 128 for int4, 16 for nvfp4, 32 for mxfp8",
    source=f'NVIDIA, "Working with Quantized Types", quantization schemes; {BUILDS_IN_RTX}, of int4 and fp8',
)
def block_sizes(view: View) -> Iterator[Hit]:
    """Blocks of an unsupported size; TRT010 reports other formats."""
    for node, numbers in view.heads:
        wanted = _BLOCKS.get(numbers.elem_type or 0, ())
        if numbers.block and wanted and numbers.block not in wanted:
            yield node, f"has blocks of {numbers.block} of {type_name(numbers.elem_type)}"


@refused(
    "TRT011",
    "An operator that computes in integers itself: TensorRT takes Q/DQ pairs only",
    cure="export QuantizeLinear and DequantizeLinear around float operators (QDQ format, not QOperator)",
    source=_OPERATORS,
)
def integer_operators(view: View) -> Iterator[Hit]:
    """QLinearConv and similar operators, and those of ONNX Runtime's domain."""
    for node in view.model.nodes:
        if node.op_type in INTEGER_KERNELS or (
            node.domain == "com.microsoft" and node.op_type.startswith(("QLinear", "QGemm", "MatMulNBits"))
        ):
            yield node, f"is a {node.op_type}"


@refused(
    "TRT012",
    "A Q or DQ of ONNX Runtime's own domain",
    cure="export with opset 21 or above, where ONNX's own operators take all types",
    source=f"{_OPERATORS}: operators of ONNX and of domain trt; {BUILDS_IN_RTX}",
)
def foreign_pairs(view: View) -> Iterator[Hit]:
    """QuantizeLinear or DequantizeLinear of domain com.microsoft."""
    for node, _ in view.pairs:
        if node.domain == "com.microsoft":
            yield node, f"is {node.domain}.{node.op_type}"


@refused(
    "TRT060",
    "An activation is quantized dynamically where TensorRT does not support it",
    cure="leave this operator in float: exclude it in patterns.nodes; or give the shapes to the export",
    source="NVIDIA, TensorRT operators, DynamicQuantize: 2 or 3 dimensions, the last a constant and a whole number of "
    "blocks of 16 (NVFP4) or 32 (MXFP8)",
)
def dynamic_blocks(view: View) -> Iterator[Hit]:
    """A TRT_FP4DynamicQuantize or TRT_MXFP8DynamicQuantize of an unsupported rank or size."""
    for node, numbers in view.heads:
        if not numbers.dynamic:
            continue
        shape = view.model.shape(node.inputs[0])
        if shape is not None and len(shape) in (2, 3) and numbers.axis % len(shape) == len(shape) - 2:
            continue  # along the last but one: not written by qdqspec, and accepted
        if why := view.dynamic_misfit(node):
            yield node, f"quantizes '{node.inputs[0]}': {why}"


_CASTS_BELOW = 19  # the opset below which the parser casts the scale of a Q to the type of the data


@refused(
    "TRT002",
    "A scale is zero, negative or not finite",
    cure="clamp scales to a small positive number; a channel of zero weights gets a scale of 0 from some tools",
    source=f'{_PARSER} ("Scale coefficients must all be positive")',
)
def positive_scales(view: View) -> Iterator[Hit]:
    """Any element of a constant scale that is not above 0; infinities and NaN too."""
    for node, numbers in view.heads:
        scale = numbers.scale
        if scale is None:
            continue
        count = int(scale.size - ((scale > 0) & (scale < float("inf"))).sum())
        if not scale.size:
            yield node, "has an empty scale"
        elif count:
            yield node, f"has {count} of {scale.size} such scales"


@refused(
    "TRT007",
    "An activation has one scale a channel",
    cure="give activations one scale a tensor; only weights take several",
    source=f"{_HEADER}: per-channel scales are for weights; {BUILDS_IN_RTX}",
)
def activations_per_channel(view: View) -> Iterator[Hit]:
    """More than one scale, without blocks, on a tensor that is not constant."""
    for node, numbers in view.heads:
        if numbers.channel_scales and not view.quantizes_constant(node):
            yield node, f"has {numbers.channel_scales} scales on axis {numbers.axis}"


@refused(
    "TRT008",
    "The scales of a weight are not along its output channels",
    cure="quantize Conv weights on axis 0, ConvTranspose on 1, Gemm and MatMul on the axis of the output",
    source=f'{_PARSER} ("The number of scales is not equal to the number of output channels")',
)
def weight_axes(view: View) -> Iterator[Hit]:
    """Several scales, without blocks, along an axis other than the output channels, or not one per channel."""
    yield from other_axes(view)
    yield from counts_of_scales(view)


def other_axes(view: View) -> Iterator[Hit]:
    """Several scales of a weight, without blocks, along an axis other than the output channels."""
    for node, dequantizer in view.quantized_weights():
        dims = view.weight_dims(node)
        if view.numbers(dequantizer).channel_scales and dims:
            axis = view.numbers(dequantizer).axis % len(dims)
            wanted = view.channel_axis(node, dequantizer)
            if axis != wanted:
                yield dequantizer, f"is quantized on axis {axis}, {node.op_type} wants {wanted}"


def counts_of_scales(view: View) -> Iterator[Hit]:
    """Several scales of a weight, without blocks, and not one for each element of their axis."""
    for node, dequantizer in view.quantized_weights():
        numbers, dims = view.numbers(dequantizer), view.weight_dims(node)
        if numbers.channel_scales and dims and numbers.channel_scales != dims[numbers.axis % len(dims)]:
            wanted = dims[numbers.axis % len(dims)]
            yield dequantizer, f"has {numbers.channel_scales} scales for {wanted} channels"


@refused(
    "TRT009",
    "The scale's type is not the type of the data",
    cure="convert scales together with the model: float16 models need float16 scales",
    source=f"{_HEADER_BEFORE}: in a strongly typed network float16 data with a float32 scale is a type error",
    until="10.13",
)
def scale_types(view: View) -> Iterator[Hit]:
    """A Q of one float type with a scale of another; ONNX allows it from opset 23, the parser casts it below 19."""
    for node, data, scale in _mismatched(view):
        yield node, f"quantizes {type_name(data)} by a scale of {type_name(scale)}"


@refused(
    "TRT019",
    "A scale is half-precision, and the data is of another type",
    cure="store the scale in the type of the data, or in float32",
    source=f"{_HEADER_SINCE}: a scale of float16 or bfloat16 must match the input, one of float32 need not; "
    f"{BUILDS_IN_RTX}",
    since="10.13",
)
def half_scales(view: View) -> Iterator[Hit]:
    """A Q of one float type with a float16 or bfloat16 scale of another."""
    for node, data, scale in _mismatched(view):
        if scale != TensorProto.FLOAT:
            yield node, f"quantizes {type_name(data)} by a scale of {type_name(scale)}"


def _mismatched(view: View) -> Iterator[tuple[Node, int, int]]:
    """Each Q whose data and scale have different float types, which the parser does not cast."""
    for node, _ in view.plain_pairs:
        if node.op_type != "QuantizeLinear" or view.model.opset < _CASTS_BELOW:
            continue
        data, scale = view.model.elem_type(node.inputs[0]), view.model.elem_type(node.inputs[1])
        if data in FLOATS and scale in FLOATS and data is not None and scale is not None and data != scale:
            yield node, data, scale


@refused(
    "TRT023",
    "A DequantizeLinear gives another type than its scale has",
    cure="store the scale in the type that is to come out, or cast behind",
    source=f"{_HEADER_BEFORE}: the output has the type of the scale; {_NEW_PARSER}: output_dtype decides",
    until="10.15",
    unknown=("10.13", "10.15"),
)
def dequantized_types(view: View) -> Iterator[Hit]:
    """A DQ whose output has another float type than its scale; ONNX allows it from opset 23 on."""
    for node, _ in view.plain_pairs:
        given, scale = view.model.elem_type(node.outputs[0]), view.model.elem_type(node.inputs[1])
        if node.op_type == "DequantizeLinear" and given in FLOATS and scale in FLOATS and given != scale:
            yield node, f"gives {type_name(given)} by a scale of {type_name(scale)}"


@refused(
    "TRT013",
    "Scale and zero point are not of one size",
    cure="give a pair as many zero points as scales, or none",
    source=f'{_PARSER} ("The scale and zero point must have the same volume")',
)
def sizes_of_zero_points(view: View) -> Iterator[Hit]:
    """Constant zero points with another number of elements; a scalar and a single element are equivalent."""
    for node, numbers in view.pairs:
        scale, zero_point = numbers.scale, numbers.zero_point
        if scale is not None and zero_point is not None and scale.size != zero_point.size:
            yield node, f"has {scale.size} scales and {zero_point.size} zero points"


@refused(
    "TRT014",
    "Several scales, and no axis is named: TensorRT takes the first axis, ONNX the second",
    cure="name the axis: attribute axis of QuantizeLinear and DequantizeLinear",
    source=f"{_PARSER} 10.1 and 10.6: without the attribute the axis is 0; {_NEW_PARSER}: it is ONNX's default, 1",
    until="10.15",
    unknown=("10.7", "10.15"),
)
def unnamed_axes(view: View) -> Iterator[Hit]:
    """One scale per channel on a node without the attribute; square weights are built with wrong scales."""
    for node, numbers in view.pairs:
        if numbers.channel_scales and "axis" not in node.attributes:
            yield node, f"has {numbers.channel_scales} scales"


@refused(
    "TRT015",
    "A scale is not stored in float32, float16 or bfloat16",
    cure="store scales as floats; for MXFP8 take TRT_MXFP8DequantizeLinear of domain trt, as Model-Optimizer does",
    source=f'{_PARSER} 10.1: other types are not looked into ("Scale coefficients must all be positive"); '
    f"{MODEL_OPTIMIZER}, mxfp8_exporter",
)
def types_of_scales(view: View) -> Iterator[Hit]:
    """Scales in ONNX's power-of-two type (E8M0, opset 24) or any other type, if it is known."""
    for node, _ in view.plain_pairs:
        scale = view.model.elem_type(node.inputs[1])
        if scale not in (None, TensorProto.UNDEFINED) and scale not in FLOATS:
            yield node, f"has a scale of {type_name(scale)}"
