"""Lint rules for TensorRT for RTX: those of TensorRT that hold there too, with what was measured, and two of its own.

The others build there without a difference in the list of kernels, or do not apply: limits of older versions, of
operators that its parser has, of sizes and types that only documents of TensorRT state, and of the fusion of kernels
that its compiler does not have. Importing the module registers the rules, and those of TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint import numbers, operators, placement
from qdqspec.backends.tensorrt.lint.rule import MEASURED, RTX_TARGETS
from qdqspec.backends.tensorrt.ops import dotted
from qdqspec.backends.tensorrt_rtx.ops import FORMATS, LARGEST_FP8_KERNEL
from qdqspec.qdq.lint import Hit, View, also_for, severities, type_name

refused, slow, _ = severities(*RTX_TARGETS)
_FOREIGN_IMPORTED = ("MultiHeadAttention", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
# The first compute capability for which a format builds; MXFP8 is then computed in float.
_BUILDS = FORMATS | {"mxfp8": FORMATS["fp8"]}


def _foreign_operators(view: View) -> Iterator[Hit]:
    """Operators of other domains without an importer, or whose importer needs a plugin that the library lacks."""
    for node, problem in operators.foreign_operators(view):
        if node is None or node.op_type not in _FOREIGN_IMPORTED:
            yield node, problem


def _lacking_formats(view: View) -> Iterator[Hit]:
    """Formats in the model that the given compute capability does not build."""
    gpu = view.capability or (0, 0)
    return operators.formats_but(view, [name for name, first in _BUILDS.items() if gpu >= first])


def _newer_formats(view: View) -> Iterator[Hit]:
    """Formats other than int8, if no compute capability is given."""
    for fmt, count in operators.pair_formats(view).items() if view.capability is None else ():
        if fmt != "int8":
            yield None, f"{count} pairs are {fmt}: compute capability {dotted(_BUILDS[fmt])} or above"


def _transposed(view: View) -> Iterator[Hit]:
    """A ConvTranspose whose weight is quantized."""
    for node, dequantizer in view.quantized_weights("ConvTranspose"):
        yield node, f"reads '{dequantizer.name}'"


def _held(name: str, words: str, **changes: Any) -> None:
    also_for(RTX_TARGETS, name, f"{MEASURED}: {words}", **changes)


_held("TRT001", '"Non-zero zero point is not supported"')
_held("TRT002", '"Scale coefficients must all be positive"; "Cannot have scale with no coefficients"')
_held("TRT004", '"input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8"')
_held("TRT005", '"Failed to import initializer", of int16 and fp8 (e5m2)')
_held(
    "TRT006",
    '"UINT8 zero_point only on DLA ... Defaulting to INT8", a warning',
    title="uint8 is read as int8, so that values above 127 are clipped",
)
_held(
    "TRT008",
    "the number of scales alone is checked",
    title="The number of scales of a weight is not that of the elements of their axis",
    cure="give a weight one scale, or one for each output channel",
    find=numbers.counts_of_scales,
)
_held(
    "TRT010",
    '"The blocking dimension must be the last or second to last dimension"; "Sub-byte quantization with odd tensor '
    'volume"; "ScaleMode is illegal" of one block; blocks of 64 along 96 elements build, whether with right numbers is '
    "not known",
    title="Blocks are along an axis that is not supported, or are not whole; or 4-bit numbers are not in pairs",
    cure="use whole blocks along the last or the last but one axis of a weight, and an even number of 4-bit numbers",
    find=numbers.misplaced_blocks,
)
_held("TRT011", 'no importer; that of MatMulNBits "failed to load MatMulNBits plugin"')
_held("TRT013", '"The scale and zero point must have the same volume"')
_held("TRT015", "initializers of E8M0 cannot be imported")
_held("TRT018", '"has `zero_point` which is not an initializer"')
_held(
    "TRT020",
    '"Cannot compile for target(s) sm86, because the model contains HW-specific datatypes"',
    title="Engines for this compute capability cannot have this format",
    cure="choose another format, or build for other GPUs",
    find=_lacking_formats,
)
_held(
    "TRT021",
    "the first compute capability that builds each format; MXFP8 is computed in float",
    title="The format needs a newer GPU than others do",
    cure="make sure of the GPU, or name it with --compute-capability",
    find=_newer_formats,
)
_held("TRT025", "the parser does not support it")
_held(
    "TRT029",
    '"Plugin not found"; the importer of GroupQueryAttention "failed to load GroupQueryAttention plugin"',
    find=_foreign_operators,
)
_held("TRT053", "importers are found by the operator's type")
_held("TRT060", "it is refused for its rank, its block, or an unknown extent")
_held("TRT030", "the kernel is one of float")
_held(
    "TRT041",
    "fp8 kernels exist up to 32 elements, others are of float",
    find=partial(operators.fp8_kernels, largest=LARGEST_FP8_KERNEL),
)
_held(
    "TRT043",
    "an attention is one kernel with pairs on queries, keys, values, Softmax and the result; in fp8 on a float16 model "
    "the result needs none",
    cure="quantize Q, K, V, the Softmax and the result of the second MatMul, or none of them",
    find=partial(placement.attentions_in_part, with_result=True),
)
_held(
    "TRT055",
    "the kernel is one of float in int8 and fp8, with conversions before and behind",
    title="A transposed convolution is quantized, and has float kernels only",
    cure="leave it in float",
    find=_transposed,
)
_held("TRT073", operators.FORMS)

# ---- pairs that build, and have no kernel of their format ---------------------------------------------

# The stored types for which a pooling has no kernel.
_FLOAT_POOLS = {
    "AveragePool": (TensorProto.INT8, TensorProto.FLOAT8E4M3FN),
    "MaxPool": (TensorProto.FLOAT8E4M3FN,),
}

slow(
    "TRT068",
    "The scales of a weight are not along its output channels: the product is computed in float",
    cure="quantize Conv weights on axis 0, Gemm and MatMul on the axis of the output",
    source=f"{MEASURED}: convolutions are of float, and weights of MatMul are dequantized",
)(numbers.other_axes)


@slow(
    "TRT069",
    "A pooling reads a format for which it has float kernels only",
    cure="move the pair behind it",
    source=f"{MEASURED}: AveragePool runs in float behind pairs of int8 and fp8, MaxPool behind those of fp8, with a "
    "conversion on both sides",
)
def float_pools(view: View) -> Iterator[Hit]:
    """An AveragePool of int8 or fp8, a MaxPool of fp8."""
    for node in view.of(*_FLOAT_POOLS):
        dequantizer = view.dequantizer(node.inputs[0])
        stored = None if dequantizer is None else view.numbers(dequantizer).elem_type
        if stored in _FLOAT_POOLS[node.op_type]:
            yield node, f"reads {type_name(stored)}"


# ---- operators of ONNX that TensorRT has, and TensorRT for RTX has not ---------------------------------

_LACKING = (
    "CausalConvWithState", "DeformConv", "LinearAttention", "NonMaxSuppression", "NonZero", "RoiAlign",
)  # fmt: skip


@refused(
    "TRT072",
    "The operator has no plugin or kernel in TensorRT for RTX",
    cure="cut the model before it and run the rest in the application; for a ConvTranspose use float16 or float32",
    source=f'{MEASURED}: "NonZero plugin creator version 1 was not found in plugin registry", "ROIAlign plugin was not '
    'found", "NonMaxSuppression has no runners that implement it", "Could not infer output types" of a deconv of bf16, '
    '"Strided & Dilated Deconv are currently not supported", "Unsupported reduction type" of ScatterElements',
)
def lacking_operators(view: View) -> Iterator[Hit]:
    """Operators of `_LACKING`; some forms of ConvTranspose and ScatterElements."""
    for node in view.of(*_LACKING, "ConvTranspose", "ScatterElements"):
        reduction = node.attributes.get("reduction", b"none")
        strides, dilations = (
            {*cast("list[int]", node.attributes.get(k, []))} for k in ("strides", "dilations")
        )
        if node.op_type in _LACKING:
            yield node, f"is a {node.op_type}"
        elif reduction != b"none":
            yield node, "is a ScatterElements with a reduction"
        elif strides - {1} and dilations - {1}:
            yield node, "is a ConvTranspose with strides and dilations"
        elif node.op_type == "ConvTranspose" and view.model.elem_type(node.inputs[0]) == TensorProto.BFLOAT16:
            yield node, "is a ConvTranspose of bfloat16"
