"""Rules for quantized operators that are too small or too large for TensorRT's kernels.

Source: the operators that Model-Optimizer excludes, "as kernels are missing or slower". None was measured by this
project.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import rule
from qdqspec.backends.tensorrt.lint.sources import MODEL_OPTIMIZER
from qdqspec.graph.model import Node
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import View
from qdqspec.placement.rule_sizes import (
    is_one_line,
    too_few_channels,
    too_large_for_fp8,
    too_small_to_multiply,
)

_SOURCE = f"{MODEL_OPTIMIZER}, graph_utils"


@rule(
    "TRT040",
    "slow",
    "A quantized operator is too small for the integer kernels",
    cure="leave it in float: exclude it in patterns.nodes",
    source=f"{_SOURCE}: kernels are missing or slower there",
)
def too_small(view: View) -> Iterator[Hit]:
    """Products with one row or column, or fewer than 16 elements; convolutions with few channels.

    An int8 convolution may have fewer than 16 channels if one side is a multiple of 8, and one side is 16 or it is
    the first convolution; a grouped one if its outputs are a multiple of 8 and its kernel at least 3 wide. An fp8 one
    needs more than 16.
    """
    for node in view.operators:
        if node.op_type == "Conv":
            why = _small_convolution(view, node)
        elif node.op_type in ("Gemm", "MatMul"):
            why = _small_product(view, node)
        else:
            why = ""
        if why:
            yield Hit(node.name, why)


def _small_convolution(view: View, node: Node) -> str:
    dequantizer, dims = view.weight_dequantizer(node), view.weight_dims(node)
    if dequantizer is None or len(dims) < 3:
        return ""
    made, read, *kernel = dims
    group = int(str(node.attributes.get("group", 1)))
    fp8 = view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN
    first = view.before_pair(node.inputs[0]) in view.model.inputs
    if not too_few_channels(dims, group=group, fp8=fp8, first=first):
        return ""
    groups = f" in each of {group} groups" if group > 1 else ""
    return f"has {read} channels in{groups} and {made} out, and a kernel of {'x'.join(map(str, kernel))}"


def _small_product(view: View, node: Node) -> str:
    if not all(view.dequantizer(tensor) for tensor in node.inputs[:2]):
        return ""
    result, weight = view.model.shape(node.outputs[0]), view.model.shape(node.inputs[1])
    if result is not None and is_one_line(result):
        return f"gives {'one row' if result[-2] == 1 else 'one column'} a product"
    if weight is not None and too_small_to_multiply(weight):
        return f"multiplies by {weight[-2]} x {weight[-1]}"
    return ""


@rule(
    "TRT055",
    "slow",
    "A transposed convolution is quantized to fp8",
    cure="leave it in float16, or quantize it to int8",
    source=f'{MODEL_OPTIMIZER}, fp8.py: "The quantizable op types for FP8 are limited to Conv, Gemm, Matmul, and '
    'Residual-Add"; whether a version of TensorRT has kernels is not known',
    unknown=("10.9", ""),
)
def fp8_transposed(view: View) -> Iterator[Hit]:
    """A ConvTranspose with an fp8 weight."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node) if node.op_type == "ConvTranspose" else None
        if dequantizer is not None and view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN:
            yield Hit(node.name, "has a weight of fp8")


@rule(
    "TRT041",
    "slow",
    "An fp8 convolution has a kernel that is too large",
    cure="leave it in float16: exclude it in patterns.nodes",
    source=f"{_SOURCE}: fp8 convolutions of kernel volume 32 and above",
)
def large_fp8_kernels(view: View) -> Iterator[Hit]:
    """A convolution with an fp8 weight and a large kernel, by the product of the kernel's sides."""
    for node in view.of("Conv"):
        dequantizer = view.weight_dequantizer(node)
        if dequantizer is None or view.numbers(dequantizer).elem_type != TensorProto.FLOAT8E4M3FN:
            continue
        dims = view.weight_dims(node)
        if too_large_for_fp8(dims):
            yield Hit(node.name, f"has a kernel of {prod(dims[2:])} elements")
