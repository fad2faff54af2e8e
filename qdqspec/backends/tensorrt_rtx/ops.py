"""The operators and formats that TensorRT for RTX quantizes, by compute capability, and its own placement rules.

Source: measured with TensorRT for RTX 1.7.1.116, which lists the kernels of an engine. No kernel was timed.
It differs from TensorRT (`qdqspec.backends.tensorrt.ops`):

- ConvTranspose and AveragePool run in float whatever pairs are around them, and MaxPool in fp8.
- GlobalAveragePool runs in int8 from compute capability 12.0 on, if its result has a pair too.
- MXFP8 builds from 8.9 on and is computed in float: it is not offered.
- int8 and fp8 kernels have no lower limit of channels, rows or columns. An fp8 convolution has up to 32 elements.
- Operators that move values are part of the kernels beside them, in fp8 as in int8.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from qdqspec._core.hooks import Hook
from qdqspec.backends.base import Capabilities
from qdqspec.backends.tensorrt import ops, placement
from qdqspec.graph import Model
from qdqspec.qdq import Unit, Units
from qdqspec.types import Kind

LABELS: dict[str, tuple[Kind, ...]] = {
    name: kinds
    for name, kinds in ops.LABELS.items()
    if name not in ("AveragePool", "ConvTranspose", "GlobalAveragePool")
}
_POOL_SINCE = (12, 0)  # GlobalAveragePool

# Placement rules, in the order in which they are applied: those of TensorRT that only leave pairs out, here without an
# effect on the list of kernels. Those of sizes and of fp8 operators do not hold, and those that move or add pairs have
# no effect either.
_OWN = ("large-fp8-kernel", "whole-attention")
RULES: dict[str, Hook] = {
    **{name: f"qdqspec.backends.tensorrt_rtx.ops:{name.replace('-', '_')}" for name in _OWN},
    **{name: ops.RULES[name] for name in ("transpose-to-matmul", "skip-side-of-residual-add")},
}

LARGEST_FP8_KERNEL = 32  # elements

# The first compute capability with kernels of a format.
FORMATS: dict[str, tuple[int, int]] = {"int8": (7, 5), "fp8": (8, 9), "int4": (8, 0), "nvfp4": (12, 0)}


def capabilities(compute: Collection[tuple[int, int]]) -> Capabilities:
    """The capabilities of TensorRT for RTX in engines for all of these compute capabilities."""
    pool: dict[str, tuple[Kind, ...]] = (
        {"GlobalAveragePool": ("in+out",)} if min(compute) >= _POOL_SINCE else {}
    )
    can = ops.capabilities_of({name: _why_not(name, compute) for name in FORMATS}, LABELS | pool, RULES)
    in_fp8 = {name: kinds for name, kinds in LABELS.items() if name != "MaxPool"}
    return replace(can, labels_of={"fp8": in_fp8})


def _why_not(name: str, compute: Collection[tuple[int, int]]) -> str:
    """The reason why engines for these compute capabilities have no kernels of a format; empty if they have."""
    older = sorted(gpu for gpu in compute if gpu < FORMATS[name])
    if not older:
        return ""
    first, oldest = ops.dotted(FORMATS[name]), ops.dotted(older[0])
    return f"{name} needs compute capability {first}, and engines are for {oldest} too"


# ---- placement rules that differ from those of TensorRT --------------------------------------------


def large_fp8_kernel(model: Model, units: Units) -> Units:
    """A convolution whose kernel has more than 32 elements is not computed in fp8.

    Source: 1x32, 2x16 and 4x8 are computed in fp8; 1x33, 3x11, 2x17 and 5x7 in float.
    """
    return placement.large_fp8_kernel(model, units, LARGEST_FP8_KERNEL)


def whole_attention(model: Model, units: Units) -> Units:
    """Both products of an attention are quantized with all four inputs and the result, or not at all.

    Source: an attention is one kernel with pairs on queries, keys, values, Softmax and the result. Without that on the
    result it is several, except in fp8 in a float16 model.
    """
    alone = {unit.id: unit for unit in units}

    def joined(unit: Unit) -> Unit:
        forms = (form.without("in-only") for form in unit.forms)
        return replace(unit, forms=tuple(form for form in forms if form.kinds))

    whole = placement.whole_attention(model, units)
    return tuple(unit if unit == alone[unit.id] else joined(unit) for unit in whole)
