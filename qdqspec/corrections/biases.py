"""Bias correction: the mean shift of a layer's output due to its quantized weight.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721,
section 4.2, with the means of calibration samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Floats
from qdqspec.corrections.layers import LinearLayer
from qdqspec.corrections.statistics import Means
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import dequantize


def mean_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, means: Means
) -> Floats:
    """What quantization adds to the mean of each output channel, for these means of the inputs by group."""
    real = layer.matrix(weight.astype(np.float32, copy=False)).astype(np.float64)
    stored = layer.matrix(dequantize(integers, params)).astype(np.float64)
    added = np.einsum("goc,gc->go", stored - real, means.quantized.astype(np.float64))
    added += np.einsum("goc,gc->go", real, (means.quantized - means.real).astype(np.float64))
    return np.asarray(added.reshape(-1), np.float64)


def bias_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, fit: Means, held_out: Means
) -> npt.NDArray[np.float32] | None:
    """What to add to the bias; ``None`` if it does not reduce the mean error for the held-out means of the inputs."""
    found = mean_shift(layer, weight, params, integers, fit)
    wrong = mean_shift(layer, weight, params, integers, held_out)
    return (
        -found.astype(np.float32) if float(((wrong - found) ** 2).sum()) < float((wrong**2).sum()) else None
    )
