"""Placement rules that keep single operators out of formats without fast kernels for their size.

`qdqspec.placement.sizes` defines the sizes. Weight-only formats in blocks are for products of few rows and
are not affected; nor are NVFP4 and MXFP8, which the sources do not mention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from qdqspec.graph.model import Model, Node
from qdqspec.placement.ops import weight_input
from qdqspec.placement.sizes import (
    is_one_line,
    too_few_channels,
    too_large_for_fp8,
    too_small_to_multiply,
)
from qdqspec.placement.units import Unit

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
