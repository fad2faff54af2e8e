"""Placement rules that keep single operators out of formats without fast kernels for their size.

`qdqspec.placement.rule_sizes` defines the sizes. Weight-only formats in blocks are for products of few rows and
are not affected; nor are NVFP4 and MXFP8, which the sources do not mention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod

from qdqspec.graph.model import Model, Node
from qdqspec.placement.ops import weight_input
from qdqspec.placement.units import Unit

# Sizes that narrow kernels on tensor cores do not support well.
# Source: NVIDIA Model-Optimizer, onnx/quantization/graph_utils.py (`find_nodes_from_convs_to_exclude`,
# `find_nodes_from_matmul_to_exclude`), which leaves these in float "as kernels are missing or slower". None
# of it was measured by us. Placement does not insert pairs there, and lint reports pairs that are there.


LEAST = 16  # channels of a convolution, rows and columns of the second operand of a product
_LEAST_KERNEL_IN_GROUPS = 3
_MULTIPLE = 8
LARGEST_FP8_KERNEL = 32  # elements: kernels of at least this size are slower

Dims = Sequence[int | None]


def too_few_channels(weight: Sequence[int], *, group: int, fp8: bool, first: bool) -> bool:
    """Whether a convolution's weight, output channels first, has fewer channels than its kernels need.

    An fp8 one needs more than 16 on both sides. An int8 one needs 16, or a multiple of 8 on one side if one
    side has 16 or it is the ``first`` of the model, and a square kernel; or in groups a multiple of 8 output
    channels and a kernel of at least 3.
    """
    made, read, *kernel = weight
    if fp8:
        return min(made, read) <= LEAST
    if min(made, read) >= LEAST:
        return False
    if group > 1:
        return made % _MULTIPLE != 0 or min(kernel, default=0) < _LEAST_KERNEL_IN_GROUPS
    enough = max(made, read) >= LEAST or first
    multiple = made % _MULTIPLE == 0 or read % _MULTIPLE == 0
    return not (multiple and enough and len(set(kernel)) <= 1)


def too_large_for_fp8(weight: Sequence[int]) -> bool:
    """Whether a convolution's kernel has 32 elements or more, as 7x7 has, for which fp8 kernels are slower."""
    return prod(weight[2:]) >= LARGEST_FP8_KERNEL


def is_one_line(result: Dims | None) -> bool:
    """Whether a product has one row or one column: it is a product by a vector, which tensor cores do not speed up."""
    return result is not None and len(result) > 1 and 1 in result[-2:]


def too_small_to_multiply(weight: Dims | None) -> bool:
    """Whether the second operand of a product has fewer than 16 rows or columns. Unknown sizes are large enough."""
    return weight is not None and len(weight) > 1 and any(size and size < LEAST for size in weight[-2:])


INT8, FP8 = "int8", "fp8"
_CONVS = frozenset({"Conv"})
_PRODUCTS = frozenset({"Gemm", "MatMul"})


def few_channel_conv(model: Model, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A convolution of fewer than 16 channels stays float, except int8 ones with a multiple of 8 on one side.

    An fp8 one stays float up to 16 channels.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_convs_to_exclude`: kernels are
    missing or slower.
    """

    def leaves(node: Node, fmt: str) -> bool:
        dims = _weight(model, node)
        if dims is None or len(dims) < 3:
            return False
        group = int(str(node.attributes.get("group", 1)))
        first = node.inputs[0] in model.inputs
        return too_few_channels(dims, group=group, fp8=fmt == FP8, first=first)

    return _without(model, units, _CONVS, leaves)


def large_fp8_kernel(model: Model, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A convolution whose kernel has 32 elements or more, as 7x7 has, is not computed in fp8.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_convs_to_exclude`: fp8 kernels of that size
    are missing or slower.
    """

    def leaves(node: Node, fmt: str) -> bool:
        dims = _weight(model, node)
        return fmt == FP8 and dims is not None and too_large_for_fp8(dims)

    return _without(model, units, _CONVS, leaves)


def small_gemm(model: Model, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A product with one row or column, or whose second operand has fewer than 16, stays float.

    Unknown sizes count as large.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_matmul_to_exclude`: a product by
    a vector does not use tensor cores, and theirs need 16 rows and columns.
    """

    def leaves(node: Node, fmt: str) -> bool:  # noqa: ARG001 - alike in both formats
        return is_one_line(model.shape(node.outputs[0])) or too_small_to_multiply(model.shape(node.inputs[1]))

    return _without(model, units, _PRODUCTS, leaves)


def _without(
    model: Model, units: tuple[Unit, ...], op_types: Collection[str], leaves: Callable[[Node, str], bool]
) -> tuple[Unit, ...]:
    """The units without the int8 and fp8 forms that the rule excludes for a unit's operator, one of ``op_types``."""

    def kept(unit: Unit) -> Unit:
        if unit.op_type not in op_types:
            return unit
        node = model.by_name[unit.id]
        forms = tuple(
            form
            for form in unit.forms
            if form.choice.format not in (INT8, FP8) or not leaves(node, form.choice.format)
        )
        return unit if len(forms) == len(unit.forms) else replace(unit, forms=forms)

    return tuple(kept(unit) for unit in units)


def _weight(model: Model, node: Node) -> tuple[int, ...] | None:
    """The shape of a constant weight."""
    index = weight_input(model, node)
    return None if index is None else tuple(model.constants[node.inputs[index]].dims)
