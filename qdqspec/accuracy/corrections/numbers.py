"""The corrections: scaled channels, biases without the mean shift by quantized weights, wider or narrower ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Floats
from qdqspec.accuracy.corrections.layers import LinearLayer, find_layers
from qdqspec.accuracy.corrections.problem import Problem, Ranges
from qdqspec.graph import Model
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.qdq import (
    QuantParams,
    TensorRange,
    biased_layer,
    choose_equalizations,
    equalized,
    number_format,
    tie_ranges,
    weight_key,
)
from qdqspec.types import Consumer, Method, Site

NARROW: Method = "percentile"  # the best method on SqueezeNet, the second best on a face detector
_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def equalize(problem: Problem, exact_samples: int = 2) -> Problem:
    """The problem with channels scaled by powers of two, if that gains and keeps all outputs on ``exact_samples``."""
    task, model = problem.task, problem.model
    chosen = choose_equalizations(
        model,
        task.sites,
        lambda sources: task.observe(model, sources, task.part("fit")),
        fixed=task.fixed,
        saturates=task.saturates,
    )
    if not chosen:
        return problem
    changes = tuple(change for _, change in chosen)
    other = equalized(model, changes)
    numbers = task.recalibrated(other, {tensor for chain, _ in chosen for tensor in chain.tensors})
    runs = (task.observe(one, one.outputs, task.part("fit", exact_samples)) for one in (model, other))
    is_exact = all(
        mine[name].tobytes() == its[name].tobytes() for mine, its in zip(*runs, strict=True) for name in mine
    )
    errors = task.errors(other, numbers) if is_exact else problem.errors
    scaled = replace(problem, model=other, numbers=numbers, errors=errors, equalized=changes)
    return problem.choose("equalization", scaled, len(changes))


def correct_biases(problem: Problem, samples: int = 32) -> Problem:
    """The problem with biases that remove the mean shifts of layers' outputs by quantized weights, if it gains.

    More ``samples`` take longer. Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
    Correction", arXiv 1906.04721, section 4.2, with the means of calibration samples.
    """
    task, model, numbers = problem.task, problem.model, problem.numbers
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
    observed = task.observe(model, sources, islice(task.feeds(), samples))
    biases = dict(numbers.corrections.biases)
    for layer, fit, held_out in observed_means(chosen, observed, pairs, task.is_over):
        weight = model.array(layer.weight)
        for site in of_layer[layer.weight]:
            integers = numbers.integer_weight(site)
            shift = bias_shift(layer, weight, numbers.params(site), integers, fit, held_out)
            if shift is not None:
                biases[weight_key(site)] = shift
    if not biases:
        return problem
    other = problem.with_numbers(biases=biases)
    return problem.choose("bias", other, len(biases))


def observed_means(
    layers: Iterable[LinearLayer],
    observed: Iterable[Mapping[str, Array]],
    pairs: Mapping[str, QuantParams],
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[LinearLayer, Floats, Floats]]:
    """The means of each layer's input over even and over odd samples; layers without both are omitted.

    Means are those of columns, of real values and of the quantized ones: (2, group, column). ``observed`` are the
    values of tensors in each sample; once it ``is_over``, no other one is read. ``pairs`` are the parameters by which
    inputs are quantized, by weight.
    """
    found: tuple[dict[str, list[Floats]], ...] = {}, {}
    for index, values in enumerate(observed):
        for layer in layers:
            value = values.get(layer.source)
            if value is None or not value.size or not np.isfinite(value).all():
                continue
            params = pairs.get(layer.weight)
            real = value.astype(np.float32, copy=False)
            stored = real if params is None else params.dequantize(params.quantize(real))
            means = [layer.window_means(each) for each in (real, stored)]
            if means[0] is not None and means[1] is not None:
                found[index % 2].setdefault(layer.weight, []).append(np.array(means))
        if is_over():
            break
    for layer in layers:
        if all(layer.weight in part for part in found):
            fit, held_out = (np.mean(part[layer.weight], axis=0) for part in found)
            yield layer, fit, held_out


def bias_shift(
    layer: LinearLayer, weight: Array, params: QuantParams, integers: Array, fit: Floats, held_out: Floats
) -> npt.NDArray[np.float32] | None:
    """The bias correction; ``None`` if it does not reduce the mean error for held-out means of inputs.

    It is the shift of each output channel's mean by quantization, with its sign changed.
    """
    weights = (weight.astype(np.float32, copy=False), params.dequantize(integers))
    matrices = np.array([layer.matrix(values) for values in weights], np.float64)
    outputs = (np.einsum("kgoc,kgc->kgo", matrices, each) for each in (fit, held_out))
    found, wrong = ((stored - real).reshape(-1) for real, stored in outputs)
    is_less = float(((wrong - found) ** 2).sum()) < float((wrong**2).sum())
    return -found.astype(np.float32) if is_less else None


def choose_ranges(problem: Problem, margin: float = 1.125) -> Problem:
    """The problem with wider or narrower ranges for all activations, if one gains.

    Both are judged by ranges of the even samples on the odd ones. Ranges wider by ``margin`` are for values of other
    data beyond a range: they are clipped, with an error that may be larger than that of all rounding, which grows by
    the factor of the margin only. Narrower are ranges without the rarest values (`NARROW`).
    """
    task, own = problem.task, problem.numbers.ranges
    able = {site.tensor for site in task.sites if not site.weight} - task.fixed

    def changed(ranges: Ranges, factor: float) -> Ranges:
        wider = widened(problem.model, tie_ranges(problem.model, ranges), factor)
        return {t: span for t, span in wider.items() if t in able and span != own.get(t)}

    by_even = task.ranges(problem.model, NARROW, 2)
    before = best = problem.with_numbers(ranges=changed(by_even[task.method], 1.0))
    chosen = task.method, 1.0
    for method, factor in dict.fromkeys([(task.method, margin), (NARROW, 1.0)]):
        if task.is_over():
            break
        other = problem.with_numbers(ranges=changed(by_even[method], factor))
        if other.gains_over(best):
            best, chosen = other, (method, factor)
    if best is before:
        return problem
    method, factor = chosen
    taken = changed(task.ranges(problem.model, NARROW, 1)[method], factor)
    gains = before.choose("ranges", best, len(taken)).gains
    return replace(problem.with_numbers(ranges=taken), gains=gains)


def widened(model: Model, ranges: Ranges, factor: float) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of inputs and of bounded tensors. Tied tensors have one again."""
    found = {
        tensor: span if _is_bounded(model, tensor) else TensorRange(factor * span.low, factor * span.high)
        for tensor, span in ranges.items()
    }
    return tie_ranges(model, found)


def _is_bounded(model: Model, tensor: str) -> bool:
    """Whether a tensor has the values of a graph input, or of an operator with bounded results."""
    node = model.producer.get(tensor)
    while node is not None and is_default(node):
        if not (copies_values(node) or is_nearest(node) or node.op_type in ("Dropout", "MaxPool")):
            return node.op_type in _BOUNDED
        tensor = node.inputs[0]
        node = model.producer.get(tensor)
    return tensor in model.inputs
