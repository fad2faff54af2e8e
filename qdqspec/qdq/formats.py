"""The number formats that a Q/DQ pair can use, one entry each, and the arithmetic of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqspec._core.arrays import Array
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format of stored numbers: its ONNX element type, its range, and the smallest opset of models that use it.

    ``block`` is the number of elements along the axis that share a scale, 0 for scales per channel. ``scale_type`` is
    the element type of scales if it is not the tensor's own: 8-bit floats, or powers of two (E8M0). A tensor with
    ``at_run_time`` has one scale and zero point, computed when the model runs.
    """

    name: str
    elem_type: int
    low: float
    high: float
    opset: int
    block: int = 0
    scale_type: int | None = None
    at_run_time: bool = False

    @property
    def signed(self) -> bool:
        """Whether the range is symmetric around zero."""
        return self.low < 0

    @property
    def middle(self) -> int:
        """The zero point of symmetric scales: 0 for signed formats, 128 for uint8."""
        return 0 if self.signed else int(self.high + 1) // 2

    @property
    def floating(self) -> bool:
        """Whether its numbers are floating-point, which requires zero point 0."""
        return self.elem_type in _FLOATING

    @property
    def weight_only(self) -> bool:
        """Whether it is for weights only: blocks of integers, for which no operator computes scales at run time."""
        return bool(self.block) and self.scale_type is None

    @property
    def dynamic(self) -> bool:
        """Whether the scales of activations, of blocks or of the whole tensor, are computed when the model runs."""
        return self.at_run_time or (bool(self.block) and self.scale_type is not None)

    @property
    def two_level(self) -> bool:
        """Whether its scales are quantized themselves, with one scale for all of them."""
        return self.scale_type == onnx.TensorProto.FLOAT8E4M3FN

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype of its values."""
        return onnx.helper.tensor_dtype_to_np_dtype(self.elem_type)

    @property
    def stored_type(self) -> str:
        """The ONNX element type in lower case: int8, float8e4m3fn."""
        return str(_Type.DataType.Name(self.elem_type)).lower()


_Type = onnx.TensorProto
_FLOATING = frozenset({_Type.FLOAT8E4M3FN, _Type.FLOAT4E2M1})

BLOCK_SIZES = (16, 32, 64, 128, 256)  # of 8-bit weights: those of operator MatMulNBits
RUN_TIME = "uint8_dynamic"  # for activations after a DynamicQuantizeLinear
BIAS_FORMAT = "int32"  # not produced by QuantizeLinear: such a constant is always stored as integers

# Ranges: ONNX, "Float stored in 8 bits" and "4 bits". Blocks: the sizes that runtimes have kernels for (INT4 64 or 128,
# NVFP4 16, MXFP8 32; MatMulNBits a power of two from 16 on). Blocks of integers are for weights only; activations in
# NVFP4 and MXFP8 are quantized at run time by operators of domain ``trt``, and so are MXFP8 weights, for which ONNX's
# operators need opset 24: see docs/decisions/0010-blocked-formats.md. Opset 10 has QuantizeLinear too, with one scale
# per tensor. A runtime may then fail if a bias is to be quantized: "No Op registered for Round with domain_version of
# 10".
FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat("int8", _Type.INT8, -128, 127, 13),
        NumberFormat("uint8", _Type.UINT8, 0, 255, 13),
        NumberFormat("int16", _Type.INT16, -32768, 32767, 21),
        NumberFormat("uint16", _Type.UINT16, 0, 65535, 21),
        NumberFormat("fp8", _Type.FLOAT8E4M3FN, -448.0, 448.0, 19),
        *(NumberFormat(f"int8_b{size}", _Type.INT8, -128, 127, 21, block=size) for size in BLOCK_SIZES),
        NumberFormat("int4", _Type.INT4, -8, 7, 21, block=64),
        NumberFormat("uint4", _Type.UINT4, 0, 15, 21, block=64),
        NumberFormat("nvfp4", _Type.FLOAT4E2M1, -6.0, 6.0, 23, block=16, scale_type=_Type.FLOAT8E4M3FN),
        NumberFormat("mxfp8", _Type.FLOAT8E4M3FN, -448.0, 448.0, 19, block=32, scale_type=_Type.FLOAT8E8M0),
        NumberFormat(RUN_TIME, _Type.UINT8, 0, 255, 11, at_run_time=True),
        NumberFormat(BIAS_FORMAT, _Type.INT32, -(2**31), 2**31 - 1, 13),
    )
}


def number_format(name: str) -> NumberFormat:
    """The format of that name; raises `ConfigError` naming the closest known one."""
    if name not in FORMATS:
        near = did_you_mean(name, tuple(FORMATS))
        raise ConfigError(f"unknown number format '{name}'{near}", cure=f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_stored_as(
    elem_type: int, block: int = 0, scale_type: int | None = None, *, at_run_time: bool = False
) -> NumberFormat:
    """The format that stores numbers and scales in this way; without a name if no placement can have it."""
    wanted = elem_type, block, scale_type, at_run_time
    known = (f for f in FORMATS.values() if (f.elem_type, f.block, f.scale_type, f.at_run_time) == wanted)
    return next(known, NumberFormat("", elem_type, 0, 0, 0, block, scale_type, at_run_time))


@dataclass(frozen=True, slots=True, eq=False)
class QuantParams:
    """Scale and zero point of one Q/DQ pair.

    ``scale`` is float32, ``zero_point`` holds integers of the format; both are scalars (shape ``()``), of shape
    ``(channels,)`` if ``axis`` is set, or for a blocked format of the tensor's shape with the number of blocks along
    ``axis``. real = (stored - zero_point) * scale, times ``outer`` if scales are quantized themselves. ``is_dynamic``
    is whether the scale, or those of blocks, are computed when the model runs: ``scale`` is then a placeholder, 1 of
    shape ``()``. ``precision`` is the element type that a tool set the operators to compute in, 0 if unset.
    """

    format: NumberFormat
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.generic]
    axis: int | None = None
    outer: npt.NDArray[np.float32] | None = None
    is_dynamic: bool = False
    precision: int = 0

    @property
    def has_zero_point(self) -> bool:
        """Whether the pair has an explicit zero point. ONNX allows omitting zero for DQ; from opset 21 also for Q."""
        return not (self.format.block and self.format.signed) or bool(self.zero_point.any())

    @property
    def step(self) -> npt.NDArray[np.float32]:
        """The real value of one unit of the stored numbers, in the shape of ``scale``."""
        return self.scale if self.outer is None else np.asarray(self.scale * self.outer, np.float32)

    def quantize(self, values: npt.NDArray[np.floating]) -> Array:
        """The stored numbers of ``values``: saturate(round half to even(value / scale) + zero point).

        The arithmetic is in float32 like ONNX QuantizeLinear.
        """
        step, zero_point = self._broadcast(values.shape)
        fmt = self.format
        # float32 is not exact up to 2**31; and a scalar has to stay an array
        wide: type[np.floating] = np.float64 if fmt.dtype.itemsize > 2 else np.float32
        grid = np.asarray(np.divide(values.astype(wide, copy=False), step))
        if not fmt.floating:  # otherwise the cast below rounds
            np.rint(grid, out=grid)  # in place: a weight may take gigabytes
            grid += zero_point
        np.clip(grid, fmt.low, fmt.high, out=grid)
        return np.asarray(grid.astype(fmt.dtype))

    def dequantize(self, stored: Array) -> npt.NDArray[np.float32]:
        """The real values of stored numbers: (stored - zero point) * scale."""
        step, zero_point = self._broadcast(stored.shape)
        return np.asarray((stored.astype(np.float32) - zero_point) * step, dtype=np.float32)

    def _broadcast(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Scale and zero point in a shape that broadcasts over the tensor's."""
        both = self.step, self.zero_point.astype(np.float32)
        if self.axis is None:
            return both
        step, zero_point = (along(values, shape, self.axis, self.format.block) for values in both)
        return step, zero_point

    def same(self, other: QuantParams) -> bool:
        """Whether two pairs compute the same."""
        keys = []
        for each in (self, other):
            kind = each.format.elem_type, each.format.block, each.axis, each.precision, each.is_dynamic
            keys.append((*kind, each.step.shape, each.step.tobytes(), each.zero_point.tobytes()))
        return keys[0] == keys[1]


def along(values: npt.NDArray[Any], shape: tuple[int, ...], axis: int, block: int) -> npt.NDArray[Any]:
    """Scale or zero point, of channels or of blocks along an axis, in a shape that broadcasts over the tensor's."""
    if values.ndim == 0 or (values.size == 1 and not block):
        return values.reshape(())
    axis %= len(shape)
    if block:
        return values.take(np.arange(shape[axis]) // block, axis=axis)
    return values.reshape([-1 if index == axis else 1 for index in range(len(shape))])
