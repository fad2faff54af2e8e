"""Rules for TensorRT for RTX alone: pairs that build, and have no kernel of their format."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint import numbers
from qdqspec.backends.tensorrt.lint.compiler import MEASURED
from qdqspec.backends.tensorrt_rtx.lint.held import TARGETS
from qdqspec.qdq.lint.rules import Hit, rule
from qdqspec.qdq.lint.view import View, type_name

# The stored types for which a pooling has no kernel.
_FLOAT_POOLS = {
    "AveragePool": (TensorProto.INT8, TensorProto.FLOAT8E4M3FN),
    "MaxPool": (TensorProto.FLOAT8E4M3FN,),
}

rule(
    "TRT068",
    "slow",
    "The scales of a weight are not along its output channels: the product is computed in float",
    cure="quantize Conv weights on axis 0, Gemm and MatMul on the axis of the output",
    source=f"{MEASURED}: convolutions are of float, and weights of MatMul are dequantized",
    targets=TARGETS,
)(numbers.other_axes)


@rule(
    "TRT069",
    "slow",
    "A pooling reads a format for which it has float kernels only",
    cure="move the pair behind it",
    source=f"{MEASURED}: AveragePool runs in float behind pairs of int8 and fp8, MaxPool behind those of fp8, with a "
    "conversion on both sides",
    targets=TARGETS,
)
def float_pools(view: View) -> Iterator[Hit]:
    """An AveragePool of int8 or fp8, a MaxPool of fp8."""
    for node in view.of(*_FLOAT_POOLS):
        dequantizer = view.dequantizer(node.inputs[0])
        stored = None if dequantizer is None else view.numbers(dequantizer).elem_type
        if stored in _FLOAT_POOLS[node.op_type]:
            yield node, f"reads {type_name(stored)}"
