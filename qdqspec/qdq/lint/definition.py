"""Rules that hold on every target, ids from ``ONX002`` on: what ONNX's definition of Q and DQ excludes.

ONNX's checker does not find it, and runtimes load most of these models and fail when they run. All rules were measured
with ONNX Runtime 1.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qdqspec._core.arrays import allows, shape_text
from qdqspec.graph import Model, Node
from qdqspec.graph.trt import DOMAIN
from qdqspec.qdq.lint.rules import ALL, Hit, severities
from qdqspec.qdq.lint.view import View
from qdqspec.qdq.pair_numbers import blocks_of, is_qdq

refused, _, _ = severities(ALL)
_OPERATORS = ("DequantizeLinear", "QuantizeLinear")


@refused(
    "ONX002",
    "The shape of a scale or zero point does not fit the tensor",
    cure="give one scale, one for each element of `axis`, or with `block_size` one for each block along `axis` and "
    "each element of the other axes, and zero points in the same shape; or quantize again",
    source="ONNX, QuantizeLinear and DequantizeLinear; ONNX Runtime 1.32.0 loads such models and fails when it runs",
)
def shapes(view: View) -> Iterator[Hit]:
    """Scales of another number or rank than the tensor, axis and blocks need; zero points of another shape."""
    for node in _pairs(view):
        if why := _misfit(view.model, node):
            yield node, why


@refused(
    "ONX003",
    "A scale is not finite, or a QuantizeLinear divides by a scale of zero",
    cure="calibrate again: the tensor had NaN or infinite values, or none; or leave it in float",
    source="ONNX, QuantizeLinear and DequantizeLinear; ONNX Runtime 1.32.0 gives NaN, or zeros",
)
def values(view: View) -> Iterator[Hit]:
    """A NaN or infinite scale, and 0 in that of a Q. A DQ multiplies by 0: tools write it for channels of zeros."""
    for node in _pairs(view):
        scale = view.numbers(node).scale
        if scale is not None:
            is_odd = ~np.isfinite(scale) | (scale == 0 if node.op_type == "QuantizeLinear" else False)
            if count := int(is_odd.sum()):
                yield node, f"has {count} of {scale.size} such scales"


def _pairs(view: View) -> Iterator[Node]:
    """Each Q and DQ, except those of domain ``trt``, whose scales are of other types."""
    nodes = (node for node in view.model.nodes if node.op_type in _OPERATORS and is_qdq(node))
    return (node for node in nodes if node.domain != DOMAIN)


def _misfit(model: Model, node: Node) -> str:
    """How the scale, the zero point, the axis or the blocks of a Q or DQ contradict each other; empty if not."""
    tensor, (scale, zero_point) = (
        model.shape(node.input_at(0)),
        (_known(model, node.input_at(n)) for n in (1, 2)),
    )
    axis, block = blocks_of(node)
    if scale is None:
        return ""
    if zero_point is not None and zero_point != scale and not _is_single(scale) & _is_single(zero_point):
        return f"has a zero point of shape {shape_text(zero_point)} and a scale of shape {shape_text(scale)}"
    if _is_single(scale) and not block:
        return ""
    if block < 0 or (not block and len(scale) != 1):
        return f"has a scale of shape {shape_text(scale)} and block_size {block}"
    if tensor is None:
        return ""
    if not -len(tensor) <= axis < len(tensor):
        return f"has axis {axis} in a tensor of shape {shape_text(tensor)}"
    length = tensor[axis]
    wanted: Sequence[int | None] = (length,)
    if block:
        wanted = list(tensor)
        wanted[axis] = None if length is None else -(-length // block)
    if allows(wanted, scale):
        return ""
    blocks = f"blocks of {block}" if block else "scales"
    found = f"has a scale of shape {shape_text(scale)} and not {shape_text(wanted)}"
    return f"{found} for {blocks} along axis {axis} of shape {shape_text(tensor)}"


def _known(model: Model, tensor: str) -> tuple[int, ...] | None:
    """The shape of a tensor whose sizes are all known."""
    shape = model.shape(tensor) if tensor else None
    sizes = tuple(size for size in shape or () if size is not None)
    return None if shape is None or len(sizes) < len(shape) else sizes


def _is_single(shape: Sequence[int]) -> bool:
    """Whether a tensor is a scalar, or has one dimension of one element, which runtimes read as a scalar."""
    return tuple(shape) in ((), (1,))
