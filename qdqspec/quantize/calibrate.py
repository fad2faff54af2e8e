"""Calibration: the range of every tensor from sample inputs, one sample at a time.

It is independent of runtimes: the caller passes a function that runs a model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from qdqspec.arrays import Array, Feed
from qdqspec.errors import DataError
from qdqspec.graph.model import Model
from qdqspec.graph.observe import Observer, observe
from qdqspec.graph.scopes import find_scopes
from qdqspec.graph.wire import Parts
from qdqspec.quantize.histogram import Histogram, entropy_range, mse_range, percentile_range
from qdqspec.quantize.ranges import TensorRange
from qdqspec.quantize.scales import REALS, as_real
from qdqspec.spec.vocabulary import Method
from qdqspec.units import count_text, list_text

# Takes a model and returns a function that runs it: feed in, outputs by name out. The model comes from `observe`;
# references to external data stay relative to the folder of the original.
OutputRunner: TypeAlias = Callable[[Parts], Callable[[Feed], Mapping[str, Array]]]

_FROM_HISTOGRAM: dict[Method, Callable[[Histogram], TensorRange]] = {
    "percentile": percentile_range,
    "entropy": entropy_range,
    "mse": mse_range,
}
_FLOATS = frozenset({*REALS, onnx.TensorProto.DOUBLE})
# Bounded outputs whose rare large values carry the information.
_BOUNDED = frozenset({"HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})
# too small to benefit from clipping, or to be divided into bins
_NEGLIGIBLE = float(np.finfo(np.float32).smallest_normal)
_LISTED = 5
_log = logging.getLogger(__name__)


def calibrate(
    model: Model,
    tensors: Iterable[str],
    feeds: Callable[[], Iterable[Feed]],
    method: Method,
    run: OutputRunner,
    *,
    note: Callable[[str], None] = _log.warning,
) -> dict[str, TensorRange]:
    """Return the range of each tensor over all feeds.

    ``feeds`` is called once for ``max`` and ``mean`` (of the smallest and the largest value of each sample), twice for
    the other methods (range first, then a histogram of fixed size per tensor), and its samples are never stored. The
    range of a tensor in a body of If, Loop or Scan is over all iterations. Omitted are integer tensors, those that no
    feed produced, as in a branch never taken, and those that held NaN or infinity, as masked scores do; ``note`` gets
    the latter two. Some tensors are never clipped: the model's outputs, input and output of a Softmax, the output of a
    Sigmoid and similar operators. Raises `DataError` if there is no sample.
    """
    return calibrate_with(model, tensors, feeds, (method,), run, note=note)[method]


def calibrate_with(
    model: Model,
    tensors: Iterable[str],
    feeds: Callable[[], Iterable[Feed]],
    methods: Collection[Method],
    run: OutputRunner,
    *,
    note: Callable[[str], None] = _log.warning,
) -> dict[Method, dict[str, TensorRange]]:
    """As `calibrate`, by several methods; two passes over the inputs, whatever the number of methods."""
    watch = _Watch.over(model, tensors, run)
    spans, means, unbounded = _spans(watch, feeds())
    for number, unusable in unbounded.items():
        note(f"not finite in calibration sample {number}, so left in floating point: {_quoted(unusable)}")
    seen = {*spans}.union(*unbounded.values())
    for line in _without_values(model, watch.wanted - seen, seen):
        note(line)
    found: dict[Method, dict[str, TensorRange]] = {"max": spans}
    clipped = spans.keys() - _answers(model)
    found["mean"] = spans | {tensor: means[tensor] for tensor in clipped}
    if _FROM_HISTOGRAM.keys() & set(methods):
        histograms = {
            tensor: Histogram(spans[tensor]) for tensor in clipped if spans[tensor].largest > _NEGLIGIBLE
        }
        for values in map(watch.values, feeds()):
            for tensor in histograms.keys() & values.keys():
                histograms[tensor].add(values[tensor])
        for method in _FROM_HISTOGRAM.keys() & set(methods):
            choose = _FROM_HISTOGRAM[method]
            found[method] = spans | {tensor: choose(histogram) for tensor, histogram in histograms.items()}
    return {method: found[method] for method in methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """Gives the values of the wanted tensors for one feed: from the feed itself, and from a run."""

    wanted: frozenset[str]
    inputs: frozenset[str]
    observer: Observer
    execute: Callable[[Feed], Mapping[str, Array]] | None

    @classmethod
    def over(cls, model: Model, tensors: Iterable[str], run: OutputRunner) -> _Watch:
        """Watch ``tensors`` that are floating-point or of unknown type."""
        wanted = {t for t in tensors if model.elem_type(t) in (*_FLOATS, None) and t not in model.constants}
        observer = observe(model, wanted)
        return cls(
            wanted=frozenset(wanted),
            inputs=frozenset(wanted & set(model.inputs)),
            observer=observer,
            execute=run(observer.parts) if observer.names else None,
        )

    def values(self, feed: Feed) -> dict[str, Array]:
        """Non-empty float values by tensor. Those of bodies that did not run are missing."""
        found = {name: feed[name] for name in self.inputs}
        if self.execute is not None:
            found |= self.observer.seen(self.execute(feed))
        real = {name: as_real(value) for name, value in found.items() if isinstance(value, np.ndarray)}
        return {n: v for n, v in real.items() if v.size > 0 and np.issubdtype(v.dtype, np.floating)}


def _answers(model: Model) -> set[str]:
    """Tensors whose largest values decide the result.

    If they were clipped by entropy, SqueezeNet's probabilities had an SQNR of 2 dB; if all others were, 19 dB.
    """
    bounded = (t for node in model.nodes if node.op_type in _BOUNDED for t in node.outputs)
    logits = (node.inputs[0] for node in model.nodes if node.op_type == "Softmax")
    return {*model.outputs, *bounded, *logits}


def _spans(
    watch: _Watch, feeds: Iterable[Feed]
) -> tuple[dict[str, TensorRange], dict[str, TensorRange], dict[int, list[str]]]:
    """The range of each tensor, the mean of its ranges over samples, and by sample the tensors that are not finite."""
    spans: dict[str, TensorRange] = {}
    sums: dict[str, npt.NDArray[np.float64]] = {}
    samples = Counter[str]()
    unbounded: dict[str, int] = {}
    number = -1
    for number, feed in enumerate(feeds):
        for tensor, value in watch.values(feed).items():
            low, high = float(value.min()), float(value.max())
            if not (np.isfinite(low) and np.isfinite(high)):
                unbounded.setdefault(tensor, number)
                continue
            seen = TensorRange(low, high)
            spans[tensor] = spans[tensor].union(seen) if tensor in spans else seen
            sums[tensor] = sums.get(tensor, 0.0) + np.array([seen.low, seen.high])
            samples[tensor] += 1
    if number < 0:
        raise DataError(
            "there is no calibration sample, so no range can be found",
            cure="give `inputs.calibration` at least one sample",
        )
    by_sample: dict[int, list[str]] = {}
    for tensor, first in unbounded.items():
        spans.pop(tensor, None)
        by_sample.setdefault(first, []).append(tensor)
    means = {tensor: TensorRange(*(sums[tensor] / samples[tensor]).tolist()) for tensor in spans}
    return spans, means, by_sample


def _without_values(model: Model, missing: Iterable[str], seen: Iterable[str]) -> Iterator[str]:
    """A line for each outermost body that never ran, and one for other tensors that were never computed."""
    homes, idle, others = find_scopes(model.proto).of_tensor, Counter[str](), []
    ran = {scope for tensor in seen if tensor in homes for scope in homes[tensor][0].chain}
    for tensor in sorted(missing):
        around = homes[tensor][0].chain if tensor in homes else ()
        body = next((scope.path for scope in around if scope.path and scope not in ran), "")
        if body:
            idle[body] += 1
        else:
            others.append(tensor)
    for body, count in idle.items():
        yield f"the calibration data never runs '{body}': {count_text(count, 'tensor')} left in floating point"
    if others:
        yield f"never produced by the calibration data, so left in floating point: {_quoted(others)}"


def _quoted(tensors: Sequence[str]) -> str:
    return list_text([f"'{tensor}'" for tensor in tensors], _LISTED)
