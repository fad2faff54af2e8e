"""Corrected quantization parameters of Q/DQ pairs, which replace those of calibration."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import Site

Array: TypeAlias = npt.NDArray[np.generic]
WeightKey: TypeAlias = tuple[str, str, int | None]  # tensor, number format, axis of the scales


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightNumbers:
    """The scale of a weight, and its ``integers`` if they differ from the nearest ones."""

    scale: npt.NDArray[np.float32]
    integers: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrections:
    """Ranges of activations by tensor, and scales and integers of weights, that replace those of calibration."""

    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    weights: Mapping[WeightKey, WeightNumbers] = field(default_factory=dict)


NO_CORRECTIONS = Corrections()


def weight_key(site: Site) -> WeightKey:
    """The key of a weight's numbers, which do not depend on its consumers."""
    return site.tensor, site.format, site.axis


def rounding_text(integers: Array, nearest: Array) -> str:
    """The differences of integers from the nearest ones, as text; empty if there are none.

    The differences are bytes in the order of memory, compressed with zlib, in base64.
    """
    steps = integers.astype(np.int64) - nearest.astype(np.int64)
    if not steps.any():
        return ""
    if np.abs(steps).max() > np.iinfo(np.int8).max:
        raise ValueError("integers differ from the nearest ones by more than a byte holds")
    return base64.b64encode(zlib.compress(steps.astype(np.int8).tobytes(), 9)).decode("ascii")


def rounding_steps(text: str, size: int) -> npt.NDArray[np.int8]:
    """The differences in a text of `rounding_text`; raises `ValueError` if damaged or not of ``size`` integers."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size or not unpacker.eof:
        raise ValueError(f"the rounding is not that of {size} weights")
    return np.frombuffer(data, np.int8)


def rounded(nearest: Array, text: str) -> Array:
    """The integers that a text describes, given the nearest ones. Raises `ValueError` if they do not fit."""
    steps = rounding_steps(text, nearest.size).reshape(nearest.shape)
    return np.asarray((nearest.astype(np.int64) + steps).astype(nearest.dtype))
