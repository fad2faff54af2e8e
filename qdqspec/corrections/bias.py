"""Bias correction: it removes the mean shift of a layer's output due to its quantized weight.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721,
section 4.2, with the means of calibration samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Feed, Floats
from qdqspec.corrections.layers import LinearLayer
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import dequantize, quantize

Observe: TypeAlias = Callable[[Sequence[str], Iterable[Feed]], Iterator[Mapping[str, Array]]]

ROWS = 4096  # positions of images, or tokens, of all samples of a part together


class Means(NamedTuple):
    """The means of the columns of a layer's input, (group, column): of the real values, and of the quantized ones."""

    real: Floats
    quantized: Floats


def observed_means(
    layers: Sequence[LinearLayer],
    feeds: Callable[[], Iterable[Feed]],
    observe: Observe,
    pairs: Mapping[str, QuantParams],
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[LinearLayer, Means, Means]]:
    """The means of each layer's input over even and over odd samples; layers without both are omitted.

    ``pairs`` are the parameters by which inputs are quantized, by weight. Once it ``is_late`` no other sample is read.
    """
    most = -(-2 * ROWS // max(sum(1 for _ in feeds()), 1))
    found: tuple[dict[str, list[Means]], ...] = {}, {}
    sources = list(dict.fromkeys(layer.source for layer in layers))
    for index, values in enumerate(observe(sources, feeds())):
        for layer in layers:
            value = values.get(layer.source)
            patches = None if value is None or not value.size else layer.patches(value, most)
            if patches is not None and np.isfinite(patches).all():
                params = pairs.get(layer.weight)
                stored = patches if params is None else dequantize(quantize(patches, params), params)
                means = [layer.grouped(each.mean(axis=0)[None])[:, 0] for each in (patches, stored)]
                found[index % 2].setdefault(layer.weight, []).append(Means(*np.asarray(means, np.float64)))
        if is_late():
            break
    for layer in layers:
        if all(layer.weight in part for part in found):
            fit, held_out = (Means(*np.mean(part[layer.weight], axis=0)) for part in found)
            yield layer, fit, held_out


def mean_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, means: Means
) -> Floats:
    """The shift of each output channel's mean by quantization, for these means of the inputs by group."""
    real = layer.matrix(weight.astype(np.float32, copy=False)).astype(np.float64)
    stored = layer.matrix(dequantize(integers, params)).astype(np.float64)
    added = np.einsum("goc,gc->go", stored - real, means.quantized)
    added += np.einsum("goc,gc->go", real, means.quantized - means.real)
    return np.asarray(added.reshape(-1), np.float64)


def bias_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, fit: Means, held_out: Means
) -> npt.NDArray[np.float32] | None:
    """The bias correction; ``None`` if it does not reduce the mean error for held-out means of inputs."""
    found = mean_shift(layer, weight, params, integers, fit)
    wrong = mean_shift(layer, weight, params, integers, held_out)
    is_less = float(((wrong - found) ** 2).sum()) < float((wrong**2).sum())
    return -found.astype(np.float32) if is_less else None
