"""Scale, zero point and integers from real numbers. May import floor 0, numpy and onnx.

Pure arithmetic, in float32 as ONNX QuantizeLinear does it: rounding half to even, saturating.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.quantize.formats import NumberFormat, QuantParams
from qdqspec.quantize.ranges import TensorRange

Array = npt.NDArray[np.generic]
Scales = npt.NDArray[np.float32]

_SMALLEST = np.finfo(np.float32).smallest_normal  # kernels flush subnormal scales to zero
_SCALE_OF_ZERO = np.float32(2.0**-10)  # of a tensor that is zero everywhere: any will do
# A channel's scale is at least this share of the largest one's. Runtimes keep a bias as int32 in steps of input
# scale times weight scale, and a dead channel makes that overflow: with weights of 1e-9 beside weights of 1, ONNX
# Runtime 1.31 turned a bias of 0.3 into 0.
_LEAST_SHARE = 2.0**-16


def activation_params(span: TensorRange, fmt: NumberFormat, *, symmetric: bool = False) -> QuantParams:
    """Per-tensor scale and zero point that cover ``span``.

    Signed formats are symmetric with zero point 0. Unsigned ones are asymmetric, or, where ``symmetric``
    is set and the data is signed, symmetric around the middle of the format (128 for uint8).
    """
    if fmt.signed:
        return _per_tensor(fmt, span.largest / fmt.high, 0)
    if symmetric and span.low < 0:
        middle = (fmt.high + 1) // 2
        return _per_tensor(fmt, span.largest / (middle - 1), middle)
    scale = _usable(np.asarray((span.high - span.low) / (fmt.high - fmt.low)))
    zero_point = np.clip(np.rint(fmt.low - span.low / float(scale)), fmt.low, fmt.high)
    return _per_tensor(fmt, float(scale), int(zero_point))


def weight_params(
    weight: npt.NDArray[np.floating], fmt: NumberFormat, axis: int | None, *, reduce_range: bool = False
) -> QuantParams:
    """Symmetric scales, zero point 0 (the middle for unsigned formats); one a channel where ``axis`` is set.

    ``reduce_range`` uses one bit less of an 8-bit format, for processors whose 8-bit products saturate.
    """
    axis = None if axis is None else axis % weight.ndim
    others = tuple(d for d in range(weight.ndim) if d != axis) if axis is not None else None
    largest = np.max(np.abs(weight), axis=others, initial=0.0).astype(np.float64)
    steps = (fmt.high - fmt.low) // 2
    if reduce_range and fmt.dtype.itemsize == 1:
        steps //= 2
    scale = _usable(np.maximum(largest, largest.max(initial=0.0) * _LEAST_SHARE) / steps)
    middle = 0 if fmt.signed else (fmt.high + 1) // 2
    return QuantParams(
        format=fmt, scale=scale, zero_point=np.full(scale.shape, middle, dtype=fmt.dtype), axis=axis
    )


def quantize(values: npt.NDArray[np.floating], params: QuantParams) -> Array:
    """The integers of ``values``: saturate(round half to even(value / scale) + zero point)."""
    scale, zero_point = _along_axis(params, values.ndim)
    # float32 cannot count to 2**31; and a scalar has to stay an array
    wide: type[np.floating] = np.float64 if params.format.dtype.itemsize > 2 else np.float32
    grid = np.asarray(np.rint(np.divide(values.astype(wide, copy=False), scale)))
    grid += zero_point
    np.clip(grid, params.format.low, params.format.high, out=grid)
    return grid.astype(params.format.dtype)


def bias_params(activation: QuantParams, weight: QuantParams, fmt: NumberFormat, axis: int) -> QuantParams:
    """Scale of a bias that is added to integer products: the product of the other two scales, zero point 0."""
    scale = np.asarray(activation.scale * weight.scale, dtype=np.float32)
    return QuantParams(
        format=fmt,
        scale=np.maximum(scale, _SMALLEST),
        zero_point=np.zeros(scale.shape, dtype=fmt.dtype),
        axis=axis if scale.ndim else None,
    )


def dequantize(integers: Array, params: QuantParams) -> npt.NDArray[np.float32]:
    """The reals that integers stand for: (integer - zero point) * scale."""
    scale, zero_point = _along_axis(params, integers.ndim)
    return np.asarray((integers.astype(np.float32) - zero_point) * scale, dtype=np.float32)


def _along_axis(params: QuantParams, rank: int) -> tuple[Scales, Scales]:
    zero_point = params.zero_point.astype(np.float32)
    if params.axis is None:
        return params.scale, zero_point
    shape = [1] * rank
    shape[params.axis] = -1
    return params.scale.reshape(shape), zero_point.reshape(shape)


def _per_tensor(fmt: NumberFormat, scale: float, zero_point: int) -> QuantParams:
    return QuantParams(
        format=fmt, scale=_usable(np.asarray(scale)), zero_point=np.asarray(zero_point, dtype=fmt.dtype)
    )


def _usable(scale: npt.NDArray[np.floating]) -> Scales:
    """As float32, never zero, subnormal or infinite."""
    clipped = np.clip(scale, _SMALLEST, np.finfo(np.float32).max).astype(np.float32)
    return np.where(np.asarray(scale) == 0, _SCALE_OF_ZERO, clipped)
