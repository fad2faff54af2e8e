"""8-bit weights without overflow on processors whose sums of two u8 x s8 products saturate.

VPMADDUBSW adds the products of two neighbouring columns in 16 bits. With activations of up to 255 the sum cannot
overflow if two weights of equal sign add up to at most 128; weights of opposite sign cannot overflow. The kernels
read columns in the order (kernel position, input channel); a depthwise kernel adds no two products in 16 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Floats
from qdqspec.corrections.layers import LinearLayer
from qdqspec.quantize.formats import QuantParams

MOST = 127  # the largest weight
PAIR = 128  # the largest sum of two neighbours of equal sign
_REDUCED = 63  # the largest weight of 7 bits


def overflow_free_scale(layer: LinearLayer, weight: Array, reduced: QuantParams) -> npt.NDArray[np.float32]:
    """The smallest scales, in the shape of those of 7 bits, with which no pair of weights overflows.

    Rounding adds at most a half to each of two neighbours, so that their exact sum has to stay below 127.
    """
    matrix = layer.matrix(weight).astype(np.float64)
    largest = np.abs(matrix).max(axis=-1)
    wanted = largest / MOST if layer.is_depthwise else np.maximum(largest, _pair_sums(matrix)) / (PAIR - 1)
    per_output = wanted.reshape(-1)
    scale = per_output if reduced.scale.ndim else np.asarray(per_output.max(initial=0.0))
    least = reduced.scale * (_REDUCED / MOST)
    return np.asarray(np.minimum(reduced.scale, np.maximum(scale, least)), np.float32)


def overflows(layer: LinearLayer, integers: Array) -> bool:
    """Whether some pair of these weights can overflow."""
    if layer.is_depthwise:
        return False
    return bool((_pair_sums(layer.matrix(integers).astype(np.float64)) > PAIR).any())


def without_overflow(layer: LinearLayer, integers: Array) -> Array:
    """The integers, with the smaller one of each pair that can overflow moved towards zero as far as necessary."""
    if layer.is_depthwise:
        return integers
    matrix = layer.matrix(integers).astype(np.int64)
    even = matrix.shape[-1] // 2 * 2
    first, second = matrix[..., 0:even:2], matrix[..., 1:even:2]
    beyond = np.maximum(np.abs(first) + np.abs(second) - PAIR, 0)
    excess = np.where(np.sign(first) == np.sign(second), beyond, 0)
    is_first = np.abs(first) < np.abs(second)
    matrix[..., 0:even:2] -= np.sign(first) * np.where(is_first, excess, 0)
    matrix[..., 1:even:2] -= np.sign(second) * np.where(is_first, 0, excess)
    return layer.weight_of(matrix).astype(integers.dtype)


def _pair_sums(matrix: Floats) -> Floats:
    """The largest sum of the magnitudes of two neighbours of equal sign, by group and output channel."""
    even = matrix.shape[-1] // 2 * 2
    first, second = matrix[..., 0:even:2], matrix[..., 1:even:2]
    sums = np.where(np.sign(first) == np.sign(second), np.abs(first) + np.abs(second), 0.0)
    return np.asarray(sums.max(axis=-1, initial=0.0), np.float64)
