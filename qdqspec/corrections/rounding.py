"""GPTQ: rounding of weights, column by column, with the least change of the layer's outputs.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv
2210.17323. Each column is rounded to the nearest integer, and its error is compensated in the columns not yet rounded,
by the second moments of the layer's input. Columns of largest input power come first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.corrections.layers import Array, Layer
from qdqspec.corrections.statistics import InputStatistics
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import quantize, steps_of

Floats = npt.NDArray[np.float64]

DAMPING = 0.01  # of the mean diagonal of the second moments
_BLOCK = 128  # columns after which errors are propagated to the rest


def gptq(matrix: Floats, moments: Floats, step: Floats, low: float, high: float) -> Floats:
    """Integers for a matrix (output, column), in ``step`` units of the same shape, between ``low`` and ``high``.

    ``moments`` are the second moments of the input (column, column). Raises `numpy.linalg.LinAlgError` if these cannot
    be factorized.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    rest, step = matrix[:, order].astype(np.float64), step[:, order]
    factor = _factor(moments[np.ix_(order, order)])
    rounded = np.empty_like(rest)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        block, errors = rest[:, start:stop], np.empty((len(rest), stop - start))
        for i in range(stop - start):
            column = start + i
            integers = np.clip(np.rint(block[:, i] / step[:, column]), low, high)
            rounded[:, column] = integers
            errors[:, i] = (block[:, i] - integers * step[:, column]) / factor[column, column]
            block[:, i + 1 :] -= np.outer(errors[:, i], factor[column, column + 1 : stop])
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    found = np.empty_like(rounded)
    found[:, order] = rounded
    return found


def output_error(moments: Floats, difference: Floats) -> float:
    """The power of the change at the layer's outputs due to a difference of weights (output, column)."""
    return float(np.einsum("ij,ij->", difference @ moments, difference))


def _factor(moments: Floats) -> Floats:
    """The upper Cholesky factor of the inverse of the damped moments; columns that are always zero stay independent."""
    damped = moments.astype(np.float64, copy=True)
    power = np.diag(damped)
    damped[np.diag_indices_from(damped)] += DAMPING * power.mean() + np.where(power > 0, 0.0, 1e-12)
    if not power.any():
        return np.eye(len(damped))
    inverse = np.linalg.inv(damped)
    return np.asarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float64)


def rounded_weight(layer: Layer, weight: Array, params: QuantParams, inputs: InputStatistics) -> Array:
    """The integers of a weight by `gptq`, none larger than the largest nearest integer."""
    fmt, middle = params.format, _middle(params)
    nearest = (
        layer.matrix(quantize(weight.astype(np.float32, copy=False), params)).astype(np.float64) - middle
    )
    matrix, step = _real(layer, weight), _steps(layer, params, weight.shape)
    most = np.abs(nearest).max(initial=1.0)
    low, high = max(fmt.low - middle, -most), min(fmt.high - middle, most)
    groups = zip(matrix, inputs.moments.astype(np.float64), step, strict=True)
    found = np.stack([gptq(*group, low, high) for group in groups])
    return np.asarray(layer.weight_of(found + middle).astype(fmt.dtype))


def is_better(
    layer: Layer, weight: Array, params: QuantParams, integers: Array, inputs: InputStatistics
) -> bool:
    """Whether integers change the layer's outputs less than the nearest ones, for these inputs."""
    matrix, step, middle = _real(layer, weight), _steps(layer, params, weight.shape), _middle(params)
    nearest = quantize(weight.astype(np.float32, copy=False), params)

    def error(stored: Array) -> float:
        difference = matrix - (layer.matrix(stored).astype(np.float64) - middle) * step
        moments = inputs.moments.astype(np.float64)
        return sum(output_error(m, d) for m, d in zip(moments, difference, strict=True))

    return error(integers) < error(nearest)


def _middle(params: QuantParams) -> int:
    return int(params.zero_point.reshape(-1)[0])


def _real(layer: Layer, weight: Array) -> Floats:
    return layer.matrix(weight.astype(np.float32, copy=False)).astype(np.float64)


def _steps(layer: Layer, params: QuantParams, shape: tuple[int, ...]) -> Floats:
    return layer.matrix(np.broadcast_to(steps_of(params, shape), shape)).astype(np.float64)
