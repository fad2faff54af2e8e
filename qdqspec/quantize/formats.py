"""The number formats a Q/DQ pair can use, one entry each. May import floor 0, numpy and onnx."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """An integer format: its ONNX element type, its range, and the first opset that takes it per tensor."""

    name: str
    elem_type: int
    low: int
    high: int
    opset: int
    opset_per_channel: int

    @property
    def signed(self) -> bool:
        """Whether the range is symmetric around zero."""
        return self.low < 0

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype that holds its values."""
        return onnx.helper.tensor_dtype_to_np_dtype(self.elem_type)


def _entry(name: str, elem_type: int, low: int, high: int, opset: int, per_channel: int) -> NumberFormat:
    return NumberFormat(
        name=name, elem_type=elem_type, low=low, high=high, opset=opset, opset_per_channel=per_channel
    )


BIAS_FORMAT = "int32"  # QuantizeLinear cannot make it: such a constant is always stored as integers

FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        _entry("int8", onnx.TensorProto.INT8, -128, 127, 10, 13),
        _entry("uint8", onnx.TensorProto.UINT8, 0, 255, 10, 13),
        _entry("int16", onnx.TensorProto.INT16, -32768, 32767, 21, 21),
        _entry("uint16", onnx.TensorProto.UINT16, 0, 65535, 21, 21),
        _entry(BIAS_FORMAT, onnx.TensorProto.INT32, -(2**31), 2**31 - 1, 10, 13),
    )
}


def number_format(name: str) -> NumberFormat:
    """The format of that name; raises `ConfigError` with the nearest known one."""
    if name not in FORMATS:
        near = did_you_mean(name, tuple(FORMATS))
        raise ConfigError(f"unknown number format '{name}'{near}", cure=f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True, eq=False)
class QuantParams:
    """Scale and zero point of one Q/DQ pair.

    ``scale`` is float32, ``zero_point`` has the format's dtype; both are scalars (shape ``()``), or of
    shape ``(channels,)`` where ``axis`` is set. real = (integer - zero_point) * scale.
    """

    format: NumberFormat
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.generic]
    axis: int | None = None
