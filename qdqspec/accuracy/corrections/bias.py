"""Bias correction: it removes the mean shift of a layer's output due to its quantized weight.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721,
section 4.2, with the means of calibration samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Floats
from qdqspec.accuracy.corrections.layers import LinearLayer, find_layers
from qdqspec.qdq import QuantParams, biased_layer, dequantize, number_format, quantize, weight_key
from qdqspec.types import Consumer, Site

if TYPE_CHECKING:
    from qdqspec.accuracy.corrections.find import CorrectionTask, IsOver, Problem


class Means(NamedTuple):
    """The means of the columns of a layer's input, (group, column): of real values, and of the quantized ones."""

    real: Floats
    quantized: Floats


def correct_biases(task: CorrectionTask, problem: Problem, is_over: IsOver, samples: int = 32) -> Problem:
    """The problem with biases that remove mean shifts by quantization, if it gains; more ``samples`` take longer."""
    model, numbers = problem.model, problem.numbers
    layers = find_layers(model, task.sites)
    of_layer: dict[str, list[Site]] = {}
    for site in {weight_key(site): site for site in task.sites if site.tensor in layers}.values():
        fmt, biased = number_format(site.format), biased_layer(model, site)
        is_able = not fmt.floating and not fmt.scale_type and site.tensor not in task.fixed
        # a quantized bias keeps its value
        if is_able and biased is not None and all(other.tensor != biased.bias for other in task.sites):
            of_layer.setdefault(site.tensor, []).append(site)
    chosen = [layers[name] for name in of_layer]
    by_end = {
        (site.tensor, end): site for site in reversed(task.sites) if not site.weight for end in site.consumers
    }
    pairs: dict[str, QuantParams] = {}  # of the quantized inputs, the first format of several
    for layer in chosen:
        pair = by_end.get((layer.source, Consumer(layer.node.name, 0)))
        if pair is not None and not (
            number_format(pair.format).dynamic or number_format(pair.format).at_run_time
        ):
            pairs[layer.weight] = numbers.params(pair)
    sources = list(dict.fromkeys(layer.source for layer in chosen))
    observed = task.observe(model, sources, islice(problem.judge.feeds(), samples))
    biases = dict(numbers.corrections.biases)
    for layer, fit, held_out in observed_means(chosen, observed, pairs, is_over):
        weight = model.array(layer.weight)
        for site in of_layer[layer.weight]:
            integers = numbers.integer_weight(site)
            shift = bias_shift(layer, weight, numbers.params(site), integers, fit, held_out)
            if shift is not None:
                biases[weight_key(site)] = shift
    if not biases:
        return problem
    other = problem.with_numbers(replace(numbers.corrections, biases=biases))
    return problem.choose("bias", other, len(biases))


def observed_means(
    layers: Iterable[LinearLayer],
    observed: Iterable[Mapping[str, Array]],
    pairs: Mapping[str, QuantParams],
    is_over: IsOver = lambda: False,
) -> Iterator[tuple[LinearLayer, Means, Means]]:
    """The means of each layer's input over even and over odd samples; layers without both are omitted.

    ``observed`` are the values of tensors in each sample; once it ``is_over``, no other one is read. ``pairs`` are the
    parameters by which inputs are quantized, by weight.
    """
    found: tuple[dict[str, list[Means]], ...] = {}, {}
    for index, values in enumerate(observed):
        for layer in layers:
            value = values.get(layer.source)
            if value is None or not value.size or not np.isfinite(value).all():
                continue
            params = pairs.get(layer.weight)
            real = value.astype(np.float32, copy=False)
            stored = real if params is None else dequantize(quantize(real, params), params)
            means = [layer.window_means(each) for each in (real, stored)]
            if means[0] is not None and means[1] is not None:
                found[index % 2].setdefault(layer.weight, []).append(Means(means[0], means[1]))
        if is_over():
            break
    for layer in layers:
        if all(layer.weight in part for part in found):
            fit, held_out = (Means(*np.mean(part[layer.weight], axis=0)) for part in found)
            yield layer, fit, held_out


def bias_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, fit: Means, held_out: Means
) -> npt.NDArray[np.float32] | None:
    """The bias correction; ``None`` if it does not reduce the mean error for held-out means of inputs.

    It is the shift of each output channel's mean by quantization, with its sign changed.
    """
    real, stored = (
        layer.matrix(values).astype(np.float64)
        for values in (weight.astype(np.float32, copy=False), dequantize(integers, params))
    )
    found, wrong = (
        (np.einsum("goc,gc->go", stored, each.quantized) - np.einsum("goc,gc->go", real, each.real)).reshape(
            -1
        )
        for each in (fit, held_out)
    )
    is_less = float(((wrong - found) ** 2).sum()) < float((wrong**2).sum())
    return -found.astype(np.float32) if is_less else None
