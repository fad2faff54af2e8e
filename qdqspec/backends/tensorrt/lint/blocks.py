"""Rules for activations quantized in blocks (NVFP4, MXFP8) in TensorRT."""

from __future__ import annotations

from collections.abc import Iterator

from qdqspec.backends.tensorrt.lint.rule import rule
from qdqspec.graph.trt import FP4_DYNAMIC
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import View
from qdqspec.placement.ops import dynamic_misfit
from qdqspec.quantize.formats import number_format


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
