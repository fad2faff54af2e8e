"""Corrected quantization parameters of Q/DQ pairs, which replace those of calibration."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import Site

WeightKey: TypeAlias = tuple[str, str, int | None]  # tensor, number format, axis of the scales

MOST_STEPS = 127  # by which an integer of a weight may differ from the nearest one: a scheme stores a byte


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrections:
    """Ranges of activations by tensor, and scales of weights, that replace those of calibration.

    ``biases`` are added to the biases of the layers whose weights are quantized, one number for each output channel.
    """

    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    weights: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)
    biases: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)


NO_CORRECTIONS = Corrections()


def weight_key(site: Site) -> WeightKey:
    """The key of a weight's numbers, which do not depend on its consumers."""
    return site.tensor, site.format, site.axis


def rounding_text(integers: Array, nearest: Array) -> str:
    """The differences of integers from the nearest ones, at most `MOST_STEPS`, as text: one byte each."""
    return packed((integers.astype(np.int64) - nearest.astype(np.int64)).astype(np.int8))


def shift_text(shift: npt.NDArray[np.float32] | None) -> str:
    """The shift of a bias as text; empty if there is none."""
    return "" if shift is None else packed(shift.astype("<f4"))


def packed(values: Array) -> str:
    """The values as text: bytes in the order of memory, compressed with zlib, in base64."""
    return base64.b64encode(zlib.compress(values.tobytes())).decode("ascii")


def unpacked(text: str, dtype: np.dtype[np.generic], size: int) -> Array:
    """The ``size`` values of a text of `packed`; raises `ValueError` if it is damaged or holds another number."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), size * dtype.itemsize + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size * dtype.itemsize or not unpacker.eof:
        raise ValueError(f"the text does not hold {size} values")
    return np.frombuffer(data, dtype)
