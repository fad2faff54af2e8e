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


LOST_SHARE = 1 / 512  # of the largest magnitude: smaller values round to zero in 8 bits
_FEW = 1 << 12  # values that are examined first


def extremes(values: Array) -> Array:
    """The smallest and the largest value; NaN twice if one is NaN; nothing of an empty array.

    A third value follows if some values are below a quarter of the largest magnitude: one of at least `LOST_SHARE` of
    the largest magnitude, or else the largest of them. It shows whether a mask is far beyond all other values.
    """
    if not values.size:
        return values
    low, high, flat = values.min(), values.max(), values.reshape(-1)
    largest = max(-float(low), float(high))
    inner: Array = flat[:0]
    for some in (evenly_spaced(values, _FEW), flat):
        rest = some[np.abs(some) < largest / 4]
        inner = rest[np.abs(rest).argmax() :][:1] if rest.size else rest
        if (np.abs(inner) >= LOST_SHARE * largest).any():
            break
    return np.array([low, high, *inner], values.dtype)


def evenly_spaced(values: Array, most: int = MOST_SPACED) -> Array:
    """At most ``most`` values at equal distances that share no factor with a dimension: from all channels and rows."""
    step = max(1, -(-values.size // most))
    while any(math.gcd(step, dim) > 1 for dim in values.shape):
        step += 1
    return values.reshape(-1)[::step]


REDUCTIONS: Mapping[Reduction, Callable[[Array], Array]] = {"extremes": extremes, "spaced": evenly_spaced}
