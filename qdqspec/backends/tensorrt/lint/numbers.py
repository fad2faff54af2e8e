"""Rules for zero points, types, blocks and operators that TensorRT's ONNX parser rejects.

Sources: NvInfer.h of TensorRT 11.1 (quantize and dequantize layers), the onnx-tensorrt parser, its operator table,
and NVIDIA's "Working with Quantized Types". None was measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import HEADER, HEADER_BEFORE, HEADER_SINCE, OPERATORS, PARSER, rule
from qdqspec.graph.trt import FP4_DYNAMIC
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import View, type_name
from qdqspec.placement.ops import dynamic_misfit
from qdqspec.placement.restore import is_constant
from qdqspec.quantize.formats import number_format

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
_INTEGER_KERNELS = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)


@rule(
    "TRT001",
    "refused",
    "The zero point is not zero: TensorRT quantizes symmetrically only",
    cure="quantize again with zero points of 0, that is with int8 activations in place of asymmetric uint8 ones",
    source=f'{PARSER} ("the zero point ... must be all zeros"); github.com/NVIDIA/TensorRT issue 2774',
)
def zero_points(view: View) -> Iterator[Hit]:
    """Any element of a constant zero point other than 0; TRT003 reports computed ones."""
    for node in view.heads:
        zero_point = view.numbers(node).zero_point
        if zero_point is not None and zero_point.any():
            yield Hit(node.name, f"has zero point {zero_point.flat[abs(zero_point).argmax()]:g}")


@rule(
    "TRT003",
    "refused",
    "A scale or zero point is computed when the model runs",
    cure="fold the model (`qdqspec fold`), or export static quantization",
    source=f"{HEADER_BEFORE}: both must be build-time constants",
    until="10.13",
)
def computed_numbers(view: View) -> Iterator[Hit]:
    """A scale or zero point that is neither a constant nor dequantized from one."""
    for node in view.heads:
        numbers = view.numbers(node)
        if numbers.scale is None or numbers.zero_point is None:
            yield Hit(node.name, "reads numbers that other nodes make")


@rule(
    "TRT018",
    "refused",
    "A zero point is computed when the model runs",
    cure="fold the model (`qdqspec fold`), or leave the zero point out: it must be 0",
    source=f"{HEADER_SINCE}: the zero point must be a build-time constant, the scale need not",
    since="10.13",
)
def computed_zero_points(view: View) -> Iterator[Hit]:
    """A zero point that is neither a constant nor dequantized from one, with any scale."""
    for node in view.heads:
        if len(node.inputs) > 2 and node.inputs[2] and not is_constant(view.model, node.inputs[2:3]):
            yield Hit(node.name, f"reads zero point '{node.inputs[2]}', which another node makes")


@rule(
    "TRT004",
    "refused",
    "A bias is stored as int32 behind a DequantizeLinear",
    cure="keep biases in float, as `qdqspec tune --backend tensorrt` does",
    source=f'{PARSER} 10.1 ("TensorRT only allows FP8, INT8, and INT4 quantization")',
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
    source=f'{PARSER} ("TensorRT only allows FP8, INT8, and INT4 quantization"); {HEADER} for fp4',
)
def formats(view: View) -> Iterator[Hit]:
    """Stored numbers of another type; TRT004 reports int32, TRT006 uint8."""
    for node in view.heads:
        elem_type = view.numbers(node).elem_type
        if elem_type is not None and elem_type not in _TAKEN | {TensorProto.INT32}:
            yield Hit(node.name, f"is {type_name(elem_type)}")


@rule(
    "TRT017",
    "refused",
    "The model's opset is older than the number format",
    cure="raise the opset: fp8 came with 19, int4 with 21, fp4 with 23",
    source="ONNX, QuantizeLinear and DequantizeLinear: types by opset",
)
def opsets(view: View) -> Iterator[Hit]:
    """A stored type that ONNX's operators do not have in the model's opset; ONNX's checker does not check this."""
    for node in view.heads:
        if node.name in view.too_new:
            name, since = view.too_new[node.name]
            yield Hit(node.name, f"is {name}, and the opset is {view.model.opset}, not {since}")


@rule(
    "TRT006",
    "refused",
    "uint8 is refused, or read as int8, so that what lies above 127 is cut off",
    cure="quantize to int8; uint8 and asymmetric numbers are for the DLA only, behind a parser flag",
    source=f'{PARSER} ("Found unsupported input type" in 10.1, a warning in others); '
    "OnnxParserFlag.ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA",
)
def unsigned(view: View) -> Iterator[Hit]:
    """uint8 with zero points of 0, for which the parser only warns; TRT001 reports other zero points."""
    for node in view.heads:
        numbers = view.numbers(node)
        zero = numbers.zero_point is not None and not numbers.zero_point.any()
        if numbers.elem_type == TensorProto.UINT8 and zero:
            yield Hit(node.name, "is uint8")


@rule(
    "TRT010",
    "refused",
    "Blocks lie where TensorRT does not take them",
    cure="use blocks for fp8, int4 and fp4 only, whole ones, along the last or the last but one axis of a weight; "
    "let TensorRT's operators (TRT_FP4DynamicQuantize, TRT_MXFP8DynamicQuantize) find the scales of activations",
    source=f'{HEADER}: one blocking dimension, last or second to last; {PARSER} ("Inferred block size is not an '
    'integer"; "4-bit quantization requires an even number of elements")',
)
def blocks(view: View) -> Iterator[Hit]:
    """Blocks of another format or axis, of activations, or that do not divide it; an odd number of 4-bit numbers.

    TRT060 reports dynamically quantized activations.
    """
    for node in view.heads:
        numbers, shape = view.numbers(node), view.model.shape(node.inputs[0])
        if numbers.dynamic:
            continue
        axis = numbers.axis % len(shape) if shape else 0
        size = shape[axis] if shape else None
        if numbers.block and numbers.elem_type not in _BLOCKS:
            yield Hit(node.name, f"has blocks of {numbers.block} of {type_name(numbers.elem_type)}")
        elif numbers.block and not view.quantizes_constant(node):
            yield Hit(node.name, f"has blocks of {numbers.block} of an activation, with constant scales")
        elif numbers.block and shape and axis < len(shape) - 2:
            yield Hit(node.name, f"has blocks along axis {numbers.axis} of {len(shape)}")
        elif numbers.block and size and size % numbers.block:
            yield Hit(node.name, f"has blocks of {numbers.block} along {size} elements")
        elif numbers.elem_type in _FOUR_BITS and shape and all((size or 0) % 2 for size in shape):
            dims = " x ".join(map(str, shape))
            yield Hit(node.name, f"has an odd number of 4-bit numbers: {dims}")


@rule(
    "TRT016",
    "refused",
    "Blocks have a size that no kernel is made for",
    cure="choose blocks of 64 or 128 for int4, 16 for nvfp4, 32 for mxfp8",
    source='NVIDIA, "Working with Quantized Types", quantization schemes',
)
def block_sizes(view: View) -> Iterator[Hit]:
    """Blocks of an unsupported size; TRT010 reports other formats."""
    for node in view.heads:
        numbers = view.numbers(node)
        wanted = _BLOCKS.get(numbers.elem_type or 0, ())
        if numbers.block and wanted and numbers.block not in wanted:
            yield Hit(node.name, f"has blocks of {numbers.block} of {type_name(numbers.elem_type)}")


@rule(
    "TRT011",
    "refused",
    "An operator that computes in integers itself: TensorRT takes Q/DQ pairs only",
    cure="export QuantizeLinear and DequantizeLinear around float operators (QDQ format, not QOperator)",
    source=OPERATORS,
)
def integer_operators(view: View) -> Iterator[Hit]:
    """QLinearConv and similar operators, and those of ONNX Runtime's domain."""
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
    source=f"{OPERATORS}: operators of ONNX and of domain trt",
)
def foreign_pairs(view: View) -> Iterator[Hit]:
    """QuantizeLinear or DequantizeLinear of domain com.microsoft."""
    for node in view.pairs:
        if node.domain == "com.microsoft":
            yield Hit(node.name, f"is {node.domain}.{node.op_type}")


@rule(
    "TRT060",
    "refused",
    "An activation is quantized as it comes where TensorRT cannot",
    cure="leave this operator in float: exclude it in patterns.nodes; or give the shapes to the export",
    source="NVIDIA, TensorRT operators, DynamicQuantize: 2 or 3 dimensions, the last a constant and a whole number of "
    "blocks of 16 (NVFP4) or 32 (MXFP8)",
)
def dynamic_blocks(view: View) -> Iterator[Hit]:
    """A TRT_FP4DynamicQuantize or TRT_MXFP8DynamicQuantize of an unsupported rank or size."""
    for node in view.heads:
        numbers = view.numbers(node)
        if not numbers.dynamic:
            continue
        fmt = number_format("nvfp4" if node.op_type == FP4_DYNAMIC else "mxfp8")
        shape = view.model.shape(node.inputs[0])
        if shape is not None and len(shape) in (2, 3) and numbers.axis % len(shape) == len(shape) - 2:
            continue  # along the last but one: not written by qdqspec, and accepted
        if why := dynamic_misfit(view.model, node.inputs[0], fmt, None):
            yield Hit(node.name, f"quantizes '{node.inputs[0]}': {why}")
