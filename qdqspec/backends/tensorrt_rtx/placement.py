"""Placement rules of TensorRT for RTX that differ from those of TensorRT (`qdqspec.backends.tensorrt.placement`).

Source of all: measured with TensorRT for RTX 1.7.1.116, by the kernels that it lists.
"""

from __future__ import annotations

from dataclasses import replace

from qdqspec.backends.tensorrt import placement
from qdqspec.backends.tensorrt_rtx.ops import too_large_for_fp8
from qdqspec.graph.model import Model
from qdqspec.qdq.units import Unit, Units


def large_fp8_kernel(model: Model, units: Units) -> Units:
    """A convolution whose kernel has more than 32 elements is not computed in fp8.

    Source: 1x32, 2x16 and 4x8 are computed in fp8; 1x33, 3x11, 2x17 and 5x7 in float.
    """
    return placement.without_formats(
        units,
        lambda unit, fmt: fmt == placement.FP8 and too_large_for_fp8(placement.weight_shape(model, unit)),
    )


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
