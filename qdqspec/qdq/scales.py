"""Scales, zero points and stored numbers, computed from ranges and real values.

Pure arithmetic, in float32 like ONNX QuantizeLinear: rounding half to even, saturating.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqspec._core.arrays import Array
from qdqspec.graph.trt import EXPONENTS
from qdqspec.qdq.formats import NumberFormat, QuantParams
from qdqspec.qdq.ranges import TensorRange

Scales = npt.NDArray[np.float32]

_SMALLEST = np.finfo(np.float32).smallest_normal  # kernels flush subnormal scales to zero
_SCALE_OF_ZERO = np.float32(2.0**-10)  # for a tensor of zeros, where any scale is exact
# A channel's scale is at least this share of the largest one's. Runtimes store a bias as int32 in steps of input scale
# times weight scale, which a channel of tiny weights makes overflow: with weights of 1e-9 beside weights of 1, ONNX
# Runtime 1.31 turned a bias of 0.3 into 0.
_LEAST_SHARE = 2.0**-16

REALS: dict[int, np.dtype[np.generic]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_FP8_HIGH, _FP8_LOW = 448.0, 2.0**-9  # the largest and smallest positive float8e4m3fn
_BYTES = (TensorProto.INT8, TensorProto.UINT8)


def run_time_params(fmt: NumberFormat) -> QuantParams:
    """The placeholder parameters of an activation whose scale and zero point are computed when the model runs."""
    return replace(_make_per_tensor(fmt, 1.0, 0), is_dynamic=True)


def dynamic_params(span: TensorRange, fmt: NumberFormat, axis: int | None) -> QuantParams:
    """The parameters known in advance of an activation that is quantized in blocks at run time.

    The outer scale of NVFP4 maps the largest value of ``span`` to the largest block scale; larger values are clipped.
    Source: NVIDIA Model-Optimizer, ``export_fp4`` (amax / 6 / 448).
    """
    outer = _make_usable(np.asarray(span.largest / fmt.high / _FP8_HIGH)) if fmt.two_level else None
    return replace(run_time_params(fmt), axis=axis, outer=outer)


def activation_params(span: TensorRange, fmt: NumberFormat, *, symmetric: bool = False) -> QuantParams:
    """Per-tensor scale and zero point that cover ``span``.

    Signed formats are symmetric with zero point 0. Unsigned ones are asymmetric, or, if ``symmetric`` is set and the
    data is signed, symmetric around the middle of the format (128 for uint8). Kept numbers are as they are, unless
    ``symmetric`` excludes their zero point.
    """
    middle = fmt.middle if symmetric and (fmt.signed or span.low < 0) else None
    for name, kept_scale, kept_zero in span.kept:
        if name == fmt.name and middle in (None, kept_zero):
            return _make_per_tensor(fmt, kept_scale, kept_zero)
    if fmt.signed:
        return _make_per_tensor(fmt, span.largest / fmt.high, 0)
    if symmetric and span.low < 0:
        return _make_per_tensor(fmt, span.largest / (fmt.middle - 1), fmt.middle)
    scale = _make_usable(np.asarray((span.high - span.low) / (fmt.high - fmt.low)))
    zero_point = np.clip(np.rint(fmt.low - span.low / float(scale)), fmt.low, fmt.high)
    return _make_per_tensor(fmt, float(scale), int(zero_point))


def weight_params(
    weight: npt.NDArray[np.floating], fmt: NumberFormat, axis: int | None, *, reduce_range: bool = False
) -> QuantParams:
    """Symmetric scales, zero point 0 (the middle for unsigned formats); per channel if ``axis`` is set.

    A blocked format has one scale per block along ``axis``; scales are stored as the format has them: as powers of two,
    or as 8-bit floats with one scale for all of them. ``reduce_range`` uses one bit less of an 8-bit integer
    format, for processors whose 8-bit products saturate; not of one in blocks, whose kernels do not.
    """
    axis = None if axis is None else axis % weight.ndim
    if axis is not None and fmt.block:
        starts = np.arange(0, weight.shape[axis], fmt.block)
        largest = np.maximum.reduceat(np.abs(weight), starts, axis=axis)
    else:
        others = None if axis is None else tuple(d for d in range(weight.ndim) if d != axis)
        largest = np.max(np.abs(weight), axis=others, initial=0.0)
    largest = np.asarray(largest, np.float64)
    steps = (fmt.high - fmt.low) // 2
    if reduce_range and fmt.elem_type in _BYTES and not fmt.block:
        steps //= 2
    scale = _make_usable(np.maximum(largest, largest.max(initial=0.0) * _LEAST_SHARE) / steps)
    outer = None
    if fmt.scale_type == TensorProto.FLOAT8E8M0:
        # Rounded up, so that no value of a block is clipped (the OCP specification rounds down and saturates).
        exponents = np.clip(np.ceil(np.log2(scale.astype(np.float64))), *EXPONENTS)
        scale = np.exp2(exponents).astype(np.float32)
    elif fmt.two_level:
        outer = _make_usable(np.asarray(scale.max(initial=0.0) / _FP8_HIGH))
        inside = np.clip(scale / outer, _FP8_LOW, _FP8_HIGH)  # none is rounded to zero
        scale = np.asarray(inside.astype(ml_dtypes.float8_e4m3fn), np.float32)
    zero_point = np.full(scale.shape, fmt.middle).astype(fmt.dtype)
    return QuantParams(fmt, scale, zero_point, axis, outer)


def in_type_of(params: QuantParams, elem_type: int | None) -> QuantParams:
    """The parameters with scales rounded to a tensor's element type.

    Q and DQ compute in the type of their scale, which is the model's own in float16 and bfloat16 models: quantization
    has to use the rounded scale. A scale that rounds to zero becomes the smallest positive number.
    """
    real = REALS.get(elem_type or 0)
    if real is None or real == np.float32:
        return params
    if params.outer is not None:
        return replace(params, outer=_round_scale(params.outer, real))
    return params if params.format.scale_type else replace(params, scale=_round_scale(params.scale, real))


def as_real(values: Array) -> Array:
    """Floats of a type that numpy lacks, such as bfloat16, converted to float32 (exact); others unchanged."""
    foreign = values.dtype.kind == "V" and any(values.dtype == real for real in REALS.values())
    return values.astype(np.float32) if foreign else values


def _round_scale(scale: Scales, real: np.dtype[np.generic]) -> Scales:
    limits = ml_dtypes.finfo(real)  # type: ignore[no-untyped-call]  # its stub leaves it so
    inside = np.clip(scale, float(limits.smallest_subnormal), float(limits.max))
    return np.asarray(inside.astype(real).astype(np.float32))


def quantize(values: npt.NDArray[np.floating], params: QuantParams) -> Array:
    """The stored numbers of ``values``: saturate(round half to even(value / scale) + zero point)."""
    step, zero_point = _broadcast_numbers(params, values.shape)
    fmt = params.format
    # float32 is not exact up to 2**31; and a scalar has to stay an array
    wide: type[np.floating] = np.float64 if fmt.dtype.itemsize > 2 else np.float32
    grid = np.asarray(np.divide(values.astype(wide, copy=False), step))
    if not fmt.floating:  # otherwise the cast below rounds
        np.rint(grid, out=grid)  # in place: a weight may take gigabytes
        grid += zero_point
    np.clip(grid, fmt.low, fmt.high, out=grid)
    return np.asarray(grid.astype(fmt.dtype))


def bias_params(activation: QuantParams, weight: QuantParams, fmt: NumberFormat, axis: int) -> QuantParams:
    """Scale of a bias that is added to integer products: the product of the other two scales, zero point 0."""
    scale = np.asarray(activation.scale * weight.scale, dtype=np.float32)
    zero_point = np.zeros(scale.shape, dtype=fmt.dtype)
    return QuantParams(fmt, np.maximum(scale, _SMALLEST), zero_point, axis if scale.ndim else None)


def dequantize(stored: Array, params: QuantParams) -> npt.NDArray[np.float32]:
    """The real values of stored numbers: (stored - zero point) * scale."""
    step, zero_point = _broadcast_numbers(params, stored.shape)
    return np.asarray((stored.astype(np.float32) - zero_point) * step, dtype=np.float32)


def _broadcast_numbers(params: QuantParams, shape: tuple[int, ...]) -> tuple[Scales, Scales]:
    """Scale and zero point in a shape that broadcasts over the tensor's."""
    both = params.step, params.zero_point.astype(np.float32)
    if params.axis is None:
        return both
    step, zero_point = (along(values, shape, params.axis, params.format.block) for values in both)
    return step, zero_point


def along(values: npt.NDArray[Any], shape: tuple[int, ...], axis: int, block: int) -> npt.NDArray[Any]:
    """Scale or zero point, of channels or of blocks along an axis, in a shape that broadcasts over the tensor's."""
    if values.ndim == 0 or (values.size == 1 and not block):
        return values.reshape(())
    axis %= len(shape)
    if block:
        return values.take(np.arange(shape[axis]) // block, axis=axis)
    return values.reshape([-1 if index == axis else 1 for index in range(len(shape))])


def _make_per_tensor(fmt: NumberFormat, scale: float, zero_point: int) -> QuantParams:
    return QuantParams(fmt, _make_usable(np.asarray(scale)), np.asarray(zero_point, dtype=fmt.dtype))


def _make_usable(scale: npt.NDArray[np.floating]) -> Scales:
    """The scale as float32, never zero, subnormal or infinite."""
    clipped = np.clip(scale, _SMALLEST, np.finfo(np.float32).max).astype(np.float32)
    return np.where(np.asarray(scale) == 0, _SCALE_OF_ZERO, clipped)
