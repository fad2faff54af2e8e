"""Corrections of weights and biases: rounding, the mean shift of a layer, and 8-bit weights without overflow.

GPTQ rounds each column to the nearest integer, and compensates its error in the columns not yet rounded, by the second
moments of the layer's input. Columns of largest input power come first. Source: E. Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323.

Bias correction removes the mean shift of a layer's output due to its quantized weight. Source: M. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721, section 4.2, with the means
of calibration samples.

Overflow: VPMADDUBSW adds the products of two neighbouring columns in 16 bits. With activations of up to 255 the sum
cannot overflow if two weights of equal sign add up to at most 128; weights of opposite sign cannot overflow. The
kernels read columns in the order (kernel position, input channel); a depthwise kernel adds no two products in 16 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Floats
from qdqspec.corrections.layers import LinearLayer
from qdqspec.corrections.statistics import InputStatistics, Means
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import dequantize, quantize, steps_of

DAMPING = 0.01  # of the mean diagonal of the second moments
_BLOCK = 128  # columns after which errors are propagated to the rest
_AT_ONCE = 1 << 22  # moments of groups that are rounded together
MOST = 127  # the largest 8-bit weight
PAIR = 128  # the largest sum of two neighbours of equal sign
_REDUCED = 63  # the largest weight of 7 bits


def gptq(matrix: Floats, moments: Floats, step: Floats, low: float, high: float) -> Floats:
    """Integers for a matrix (output, column), in ``step`` units of the same shape, between ``low`` and ``high``.

    ``moments`` are the second moments of the input (column, column). All three may have leading dimensions for several
    matrices. Raises `numpy.linalg.LinAlgError` if moments cannot be factorized.
    """
    order = np.argsort(-_diagonal(moments), axis=-1, kind="stable")
    columns, rows = order[..., None, :], order[..., :, None]
    rest = np.take_along_axis(matrix, columns, -1).astype(np.float64)
    step = np.take_along_axis(step, columns, -1)
    factor = _factor(np.take_along_axis(np.take_along_axis(moments, rows, -2), columns, -1))
    scale = _diagonal(factor)[..., None, :]
    rounded = np.empty_like(rest)
    for start in range(0, rest.shape[-1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[-1])
        block, errors = rest[..., start:stop], np.empty((*rest.shape[:-1], stop - start))
        for i, column in enumerate(range(start, stop)):
            integers = np.clip(np.rint(block[..., i] / step[..., column]), low, high)
            rounded[..., column] = integers
            errors[..., i] = (block[..., i] - integers * step[..., column]) / scale[..., column]
            block[..., i + 1 :] -= errors[..., i, None] * factor[..., None, column, column + 1 : stop]
        rest[..., stop:] -= errors @ factor[..., start:stop, stop:]
    return np.take_along_axis(rounded, np.argsort(order, axis=-1)[..., None, :], -1)


def output_error(moments: Floats, difference: Floats) -> float:
    """The power of the change at the layer's outputs due to a difference of weights (output, column)."""
    return float(((difference @ moments) * difference).sum())


def _factor(moments: Floats) -> Floats:
    """The upper Cholesky factor of the inverse of the damped moments; columns that are always zero stay independent."""
    power, every = _diagonal(moments), range(moments.shape[-1])
    damped = moments.astype(np.float64, copy=True)
    damped[..., every, every] += DAMPING * power.mean(axis=-1, keepdims=True) + np.where(power > 0, 0, 1e-12)
    # its product with its transpose is damped
    upper = np.linalg.cholesky(damped[..., ::-1, ::-1])[..., ::-1, ::-1]
    return _inverse_of_upper(upper.astype(np.float64, copy=False))


def _inverse_of_upper(matrix: Floats) -> Floats:
    """The inverse of an upper triangular matrix, by blocks: a sixth of the operations of a general inverse."""
    if matrix.shape[-1] <= _BLOCK:
        return np.asarray(np.linalg.inv(matrix), np.float64)
    half = matrix.shape[-1] // 2
    found = np.zeros_like(matrix)
    first = found[..., :half, :half] = _inverse_of_upper(matrix[..., :half, :half])
    second = found[..., half:, half:] = _inverse_of_upper(matrix[..., half:, half:])
    found[..., :half, half:] = -first @ (matrix[..., :half, half:] @ second)
    return found


def _diagonal(matrices: Floats) -> Floats:
    return np.diagonal(matrices, axis1=-2, axis2=-1)


def rounded_weight(layer: LinearLayer, weight: Array, params: QuantParams, inputs: InputStatistics) -> Array:
    """The integers of a weight by `gptq`, none larger than the largest nearest integer."""
    fmt, middle = params.format, _middle(params)
    stored = quantize(weight.astype(np.float32, copy=False), params)
    nearest = layer.matrix(stored).astype(np.float64) - middle
    matrix, step = _real(layer, weight), _steps(layer, params, weight.shape)
    most = np.abs(nearest).max(initial=1.0)
    low, high = max(fmt.low - middle, -most), min(fmt.high - middle, most)
    at_once = max(1, _AT_ONCE // matrix.shape[-1] ** 2)
    parts = (slice(start, start + at_once) for start in range(0, len(matrix), at_once))
    found = [gptq(matrix[p], inputs.moments[p].astype(np.float64), step[p], low, high) for p in parts]
    return np.asarray(layer.weight_of(np.concatenate(found) + middle).astype(fmt.dtype))


def is_better(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, inputs: InputStatistics
) -> bool:
    """Whether integers change the layer's outputs less than the nearest ones, for these inputs."""
    matrix, step, middle = _real(layer, weight), _steps(layer, params, weight.shape), _middle(params)
    nearest = quantize(weight.astype(np.float32, copy=False), params)

    def error(stored: Array) -> float:
        difference = matrix - (layer.matrix(stored).astype(np.float64) - middle) * step
        return output_error(inputs.moments.astype(np.float64), difference)

    return error(integers) < error(nearest)


def _middle(params: QuantParams) -> int:
    return int(params.zero_point.reshape(-1)[0])


def _real(layer: LinearLayer, weight: Array) -> Floats:
    return layer.matrix(weight.astype(np.float32, copy=False)).astype(np.float64)


def _steps(layer: LinearLayer, params: QuantParams, shape: tuple[int, ...]) -> Floats:
    return layer.matrix(np.broadcast_to(steps_of(params, shape), shape)).astype(np.float64)


def mean_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, means: Means
) -> Floats:
    """The shift of each output channel's mean by quantization, for these means of the inputs by group."""
    real = layer.matrix(weight.astype(np.float32, copy=False)).astype(np.float64)
    stored = layer.matrix(dequantize(integers, params)).astype(np.float64)
    added = np.einsum("goc,gc->go", stored - real, means.quantized.astype(np.float64))
    added += np.einsum("goc,gc->go", real, (means.quantized - means.real).astype(np.float64))
    return np.asarray(added.reshape(-1), np.float64)


def bias_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, fit: Means, held_out: Means
) -> npt.NDArray[np.float32] | None:
    """The bias correction; ``None`` if it does not reduce the mean error for held-out means of inputs."""
    found = mean_shift(layer, weight, params, integers, fit)
    wrong = mean_shift(layer, weight, params, integers, held_out)
    is_less = float(((wrong - found) ** 2).sum()) < float((wrong**2).sum())
    return -found.astype(np.float32) if is_less else None


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
