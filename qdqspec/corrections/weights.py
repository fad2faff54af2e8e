"""Corrections of weights and biases: rounding, and the mean shift of a layer.

GPTQ rounds each column to the nearest integer, and compensates its error in the columns not yet rounded, by the second
moments of the layer's input. Columns of largest input power come first. Source: E. Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323.

Bias correction removes the mean shift of a layer's output due to its quantized weight. Source: M. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721, section 4.2, with the means
of calibration samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Floats
from qdqspec.corrections.layers import LinearLayer
from qdqspec.corrections.overflow import PairMaxima, without_overflow
from qdqspec.corrections.statistics import InputStatistics, Means, Moments
from qdqspec.quantize.corrections import MOST_STEPS
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import dequantize, quantize, steps_of

DAMPING = 0.01  # of the mean diagonal of the second moments
LEAST_NOISE, TINY = 1e-9, 1e-30  # of the mean diagonal, and in all, so that noisy moments can be inverted
_BLOCK = 128  # columns after which errors are propagated to the rest
_AT_ONCE = 1 << 22  # moments of groups that are rounded together


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


def rounded_weight(
    layer: LinearLayer,
    weight: Array,
    params: QuantParams,
    fit: InputStatistics,
    held_out: InputStatistics,
    *,
    bound: PairMaxima | None = None,
) -> Array | None:
    """The integers of a weight that change the layer's outputs least; ``None`` if those are the nearest ones.

    Each output channel gets the best of three, by the statistics that were ``held_out``: the nearest integers, those of
    `gptq`, and those of `gptq` for the weight that suits inputs with noise (`noise_aware`). None is larger than the
    largest nearest integer, or differs from its own by more than a scheme can state. If sums of two products saturate,
    ``bound`` has the largest inputs, and no sum overflows with these.
    """
    fmt, middle = params.format, _middle(params)
    stored = quantize(weight.astype(np.float32, copy=False), params)
    nearest = layer.matrix(stored).astype(np.float64) - middle
    matrix, step = _real(layer, weight), _steps(layer, params, weight.shape)
    most = np.abs(nearest).max(initial=1.0)
    low, high = max(fmt.low - middle, -most), min(fmt.high - middle, most)
    outputs, found = matrix.shape[1], list[Floats]()
    at_once = max(1, _AT_ONCE // matrix.shape[-1] ** 2)
    for start in range(0, len(matrix), at_once):
        part = slice(start, start + at_once)
        wanted = [matrix[part]]
        if fit.noise[part].any():
            wanted.append(noise_aware(matrix[part], fit.moments[part], fit.noise[part]))
        steps = np.tile(step[part], (1, len(wanted), 1))
        rounded = gptq(np.hstack(wanted), fit.moments[part].astype(np.float64), steps, low, high)
        found.append(np.hstack([rounded[:, :outputs], rounded[:, -outputs:]]))
    options = [nearest]
    for option in np.split(np.concatenate(found), 2, axis=1):
        integers = layer.weight_of(np.clip(option, nearest - MOST_STEPS, nearest + MOST_STEPS))
        if bound is not None:
            integers = without_overflow(layer, integers, layer.weight_of(nearest), bound)
        options.append(np.asarray(layer.matrix(integers), np.float64))
    errors = [output_errors(held_out, matrix, option * step) for option in options]
    best = np.take_along_axis(np.stack(options), np.argmin(errors, axis=0)[None, ..., None], 0)[0]
    return None if (best == nearest).all() else layer.weight_of(best + middle).astype(fmt.dtype)


def noise_aware(matrix: Floats, moments: Moments, noise: Moments) -> Floats:
    """The matrix (group, output, column) with the least error at the outputs for inputs with noise, as quantized ones.

    It has smaller weights in directions in which the inputs have less power than the noise. With the second moments M
    of the inputs, (group, column, column), and the powers N of independent noise, (group, column), it is
    W M (M + N)^-1, the linear estimate of least squares (the Wiener filter).
    """
    exact = moments.astype(np.float64)
    noisy, every = exact.copy(), range(exact.shape[-1])
    noisy[..., every, every] += noise + LEAST_NOISE * _diagonal(exact).mean(axis=-1, keepdims=True) + TINY
    solved = np.linalg.solve(noisy, exact @ matrix.transpose(0, 2, 1))
    return np.asarray(solved.transpose(0, 2, 1), np.float64)


def output_errors(inputs: InputStatistics, matrix: Floats, quantized: Floats) -> Floats:
    """The power of the error at each output (group, output) of a quantized matrix that reads quantized inputs."""
    difference = matrix - quantized
    changed = ((difference @ inputs.moments.astype(np.float64)) * difference).sum(axis=-1)
    return np.asarray(changed + (inputs.noise[:, None] * quantized**2).sum(axis=-1), np.float64)


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
