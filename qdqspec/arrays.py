"""The types of arrays that modules exchange, and reductions of an array to fewer values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Floats: TypeAlias = npt.NDArray[np.float64]
Floats32: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]
Feed: TypeAlias = Mapping[str, Array]  # by input
Reduction: TypeAlias = Literal["extremes", "spaced"]

MOST_SPACED = 1 << 17  # values of one tensor in one sample that a histogram counts


def extremes(values: Array) -> Array:
    """The smallest and the largest value, or NaN twice if one is NaN; none of an empty array."""
    return np.array([values.min(), values.max()], values.dtype) if values.size else values


def evenly_spaced(values: Array, most: int = MOST_SPACED) -> Array:
    """At most ``most`` values of an array, flat, whose distance shares no factor with a dimension.

    So they are from all channels, rows and columns alike.
    """
    step = max(1, -(-values.size // most))
    while any(math.gcd(step, dim) > 1 for dim in values.shape):
        step += 1
    return values.reshape(-1)[::step]


REDUCTIONS: Mapping[Reduction, Callable[[Array], Array]] = {"extremes": extremes, "spaced": evenly_spaced}
