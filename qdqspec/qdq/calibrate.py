"""Calibration: the range of every tensor from sample inputs, one sample at a time, or from other tools.

It is independent of runtimes: the caller passes a function that runs a model. The percentile, entropy and squared-error
methods clip a tensor's range by a histogram with a fixed number of bins over a known range, so that memory is bounded
whatever the number of samples.

Ranges of other tools are calibration caches, which the backend of their runtime reads (hook ``ranges``), or plain
numbers in JSON: ``{"tensor": 6.0}`` for -6 to 6, or ``{"tensor": [-1.5, 6.0]}``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from qdqspec._core import hooks
from qdqspec._core.arrays import LOST_SHARE, REDUCTIONS, Array, Feed, Floats, Reduction, as_real
from qdqspec._core.records import parse_json
from qdqspec._core.units import list_text
from qdqspec.errors import DataError
from qdqspec.graph import Model, with_outputs
from qdqspec.graph.ops import copies_values
from qdqspec.qdq.quantizer import REALS
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Method

BINS = 2048
PERCENTILE = 99.99  # percentage of all values that is not clipped
_LEVELS = 128  # of the magnitude, as in an 8-bit symmetric grid
_MSE_CANDIDATES = 128
_MSE_STEPS = 255  # of an 8-bit grid over the whole range


class Histogram:
    """Counts of non-zero values in `BINS` equal bins on each side of zero, up to the largest magnitude of ``span``.

    Zeros are not counted: every grid represents zero exactly, and their large number after a Relu would dominate all
    other counts.
    """

    __slots__ = ("counts", "span")

    def __init__(self, span: TensorRange) -> None:
        self.span = span
        self.counts: Floats = np.zeros(2 * BINS)

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Count values. Changes this histogram."""
        numbers = values[values != 0].astype(np.float64)
        limit = self.span.largest
        self.counts += np.histogram(numbers, bins=2 * BINS, range=(-limit, limit))[0]

    @property
    def edges(self) -> Floats:
        """Borders of the bins, one more than there are bins."""
        return np.linspace(-self.span.largest, self.span.largest, 2 * BINS + 1)

    @property
    def magnitudes(self) -> Floats:
        """Counts of absolute values in `BINS` equal bins."""
        return self.counts[BINS:] + self.counts[:BINS][::-1]


def percentile_range(histogram: Histogram, percentile: float = PERCENTILE) -> TensorRange:
    """Clip equal shares of both tails; at least ``percentile`` percent of the non-zero values stay inside."""
    total = histogram.counts.sum()
    if total == 0:
        return histogram.span
    share = np.cumsum(histogram.counts) / total
    cut = (100 - percentile) / 200
    edges = histogram.edges
    low = edges[np.searchsorted(share, cut, side="right")]
    high = edges[np.searchsorted(share, 1 - cut, side="left") + 1]
    span = histogram.span
    return TensorRange(float(np.clip(low, span.low, 0)), float(np.clip(high, 0, span.high)))


def entropy_range(histogram: Histogram) -> TensorRange:
    """Entropy calibration: clip where the relative entropy of magnitudes and their 128-level image is smallest.

    The search of S. Migacz (NVIDIA, GPU Technology Conference 2017, session S7310): for every number of bins kept,
    the tail is added to the last bin kept, the bins are merged into 128 levels and spread again over the non-empty
    ones, and the divergence of both is computed. Prefix sums give all thresholds at once.
    """
    counts = histogram.magnitudes
    if counts.sum() == 0:
        return histogram.span
    divergence = _divergences(counts)
    kept = BINS - int(np.argmin(divergence[::-1]))  # among equals the one that clips least
    return _clip(histogram.span, histogram.span.largest * (kept + 0.5) / BINS)


def mse_range(histogram: Histogram) -> TensorRange:
    """Clip where the squared error of an 8-bit grid, rounding and clipping together, is smallest."""
    if histogram.counts.sum() == 0:
        return histogram.span
    edges = histogram.edges
    centers = (edges[:-1] + edges[1:]) / 2
    limits = histogram.span.largest * np.arange(_MSE_CANDIDATES, 0, -1) / _MSE_CANDIDATES
    errors = []
    for limit in limits:
        low, high = max(histogram.span.low, -limit), min(histogram.span.high, limit)
        clipped, step = np.clip(centers, low, high) - centers, (high - low) / _MSE_STEPS
        errors.append(float((histogram.counts * (clipped**2 + step**2 / 12)).sum()))
    best = int(np.argmin(errors))  # the first is the widest
    return _clip(histogram.span, float(limits[best]))


def _clip(span: TensorRange, limit: float) -> TensorRange:
    return TensorRange(max(span.low, -limit), min(span.high, limit))


def _divergences(counts: Floats) -> Floats:
    """Relative entropy for every number of bins kept; infinite for fewer bins than levels.

    ``counts`` is P before the tail is added; Q spreads the sum of a level over its non-empty bins.
    """
    sums = _prefix(counts)
    filled = _prefix((counts > 0).astype(np.float64))
    own_information = _prefix(_xlogx(counts))
    kept = np.arange(_LEVELS, BINS + 1)
    borders = kept[:, None] * np.arange(_LEVELS + 1) // _LEVELS
    level = np.diff(sums[borders], axis=1)
    bins = np.diff(filled[borders], axis=1)
    total, inside = sums[-1], sums[kept]
    tail, last = total - inside, counts[kept - 1]
    bins[:, -1] += (last == 0) & (tail > 0)
    mass = level.copy()
    mass[:, -1] += tail
    information = own_information[kept] - _xlogx(last) + _xlogx(last + tail)
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = np.where(mass > 0, mass * np.log(level / bins), 0.0).sum(axis=1)
        found = (information - cross) / total - np.log(total) + np.log(inside)
    result = np.full(BINS + 1, np.inf)
    result[kept] = np.where(np.isfinite(found), found, np.inf)
    return result


def _prefix(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _xlogx(values: Floats) -> Floats:
    return values * np.log(np.where(values > 0, values, 1.0))


# Takes a model and returns a function that runs it: feed in, outputs by name out. The model comes from `with_outputs`;
# references to external data stay relative to the folder of the original. If the function has an attribute
# ``reduced``, that runs it too and reduces the values of each output, so that fewer are transferred.
OutputRunner: TypeAlias = Callable[[onnx.ModelProto], Callable[[Feed], Mapping[str, Array]]]

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


def calibrate_with(
    model: Model,
    tensors: Iterable[str],
    feeds: Callable[[], Iterable[Feed]],
    methods: Collection[Method],
    run: OutputRunner,
    *,
    note: Callable[[str], None] = _log.warning,
) -> dict[Method, dict[str, TensorRange]]:
    """Return the range of each tensor over all feeds, by several methods.

    ``feeds`` is called once for ``max`` and ``mean`` (of the smallest and the largest value of each sample), twice for
    the other methods (range first, then a histogram of fixed size per tensor), and its samples are never stored. The
    range of a tensor in a body of If, Loop or Scan is over all iterations. Raises `DataError` if there is no sample.

    No range have integer tensors, and with a line to ``note``: tensors that no feed produced; tensors with NaN,
    infinity, or more than half of the largest number of their type, as masked scores have; and masked scores before a
    Softmax, if 8 bits would keep the mask alone. Outputs of the model, input and output of a Softmax, and outputs of
    Sigmoid and similar operators are never clipped.
    """
    watch = _Watch(model, tensors, run)
    spans, means, unbounded, inner = _collect_spans(watch, feeds())
    for number, unusable in unbounded.items():
        note(
            f"infinite, NaN or as large as the float type allows in calibration sample {number}, as masks are, so left "
            f"in floating point: {_quote(unusable)}"
        )
    seen = {*spans}.union(*unbounded.values())
    if missing := sorted(watch.wanted - seen):
        note(f"never produced by the calibration data, so left in floating point: {_quote(missing)}")
    found: dict[Method, dict[str, TensorRange]] = {"max": spans}
    # The largest values of these decide the result: if they were clipped by entropy, SqueezeNet's probabilities had an
    # SQNR of 2 dB; if all others were, 19 dB.
    bounded = (t for node in model.nodes if node.op_type in _BOUNDED for t in node.outputs)
    compared = (node.inputs[0] for node in model.nodes if node.op_type == "Softmax")
    clipped = spans.keys() - {*model.outputs, *bounded, *compared}
    found["mean"] = spans | {tensor: means[tensor] for tensor in clipped}
    if _FROM_HISTOGRAM.keys() & set(methods):
        histograms = {
            tensor: Histogram(spans[tensor]) for tensor in clipped if spans[tensor].largest > _NEGLIGIBLE
        }
        for feed in feeds():
            values = watch.values(feed, "spaced")
            for tensor in histograms.keys() & values.keys():
                histograms[tensor].add(values[tensor])
        for method in _FROM_HISTOGRAM.keys() & set(methods):
            choose = _FROM_HISTOGRAM[method]
            found[method] = spans | {tensor: choose(histogram) for tensor, histogram in histograms.items()}
    logits = _find_logits(model)
    inner = {tensor: largest for tensor, largest in inner.items() if tensor in logits}
    usable: dict[Method, dict[str, TensorRange]] = {}
    lost: set[str] = set()
    for method in methods:
        ranges = found[method]
        masks = {t for t, span in ranges.items() if 0 < inner.get(t, 0.0) < LOST_SHARE * span.largest}
        usable[method] = {tensor: span for tensor, span in ranges.items() if tensor not in masks}
        lost |= masks
    if lost:
        note(
            "in 8 bits all scores beside those of a mask would be zero before a Softmax, so left in floating point: "
            f"{_quote(sorted(lost))}"
        )
    return usable


class _Watch:
    """Gives the values of the wanted tensors for one feed: from the feed itself, and from a run.

    Wanted are ``tensors`` that are floating-point or of unknown type.
    """

    def __init__(self, model: Model, tensors: Iterable[str], run: OutputRunner) -> None:
        kinds = (*_FLOATS, None)
        self.wanted = {t for t in tensors if model.elem_type(t) in kinds and t not in model.constants}
        self._inputs = self.wanted & set(model.inputs)
        self._observer = with_outputs(model, self.wanted)
        self._execute = run(self._observer.proto) if self._observer.names else None
        # the masks of a model that was converted from float16 have the largest numbers of that type
        self._given_type = model.converted_from

    def largest(self, value: Array) -> float:
        """The largest number of the type in which the model was given."""
        return float(np.finfo(self._given_type or str(value.dtype)).max)

    def values(self, feed: Feed, how: Reduction) -> dict[str, Array]:
        """Float values by tensor, reduced. Empty tensors are left out: their body did not run."""
        found = {name: feed[name] for name in self._inputs}
        if self._execute is not None:
            reduced = getattr(self._execute, "reduced", None)
            found |= self._observer.seen(self._execute(feed) if reduced is None else reduced(feed, how))
        real = {name: as_real(value) for name, value in found.items() if isinstance(value, np.ndarray)}
        return {
            name: REDUCTIONS[how](value)  # of what is reduced already, the same values
            for name, value in real.items()
            if value.size > 0 and np.issubdtype(value.dtype, np.floating)
        }


def _find_logits(model: Model) -> set[str]:
    """Tensors that a Softmax reads, directly or through copies: differences of their values count, not their sizes."""
    found: set[str] = set()
    for node in model.nodes:
        reads = node if node.op_type in ("LogSoftmax", "Softmax") else None
        while reads is not None:
            found.add(reads.inputs[0])
            before = model.producer.get(reads.inputs[0])
            copies = before is not None and (copies_values(before) or before.op_type == "Cast")
            reads = before if copies else None
    return found


def _collect_spans(
    watch: _Watch, feeds: Iterable[Feed]
) -> tuple[dict[str, TensorRange], dict[str, TensorRange], dict[int, list[str]], dict[str, float]]:
    """The range of each tensor, the mean of its ranges over samples, and by sample the tensors that are not finite.

    Then the largest magnitude of each tensor below a quarter of its largest one, as far as `extremes` has it.
    """
    spans: dict[str, TensorRange] = {}
    sums: dict[str, npt.NDArray[np.float64]] = {}
    samples = Counter[str]()
    unbounded: dict[str, int] = {}
    inner: dict[str, float] = {}
    number = -1
    for number, feed in enumerate(feeds):
        for tensor, value in watch.values(feed, "extremes").items():
            low, high = float(value.min()), float(value.max())
            if not max(-low, high) < watch.largest(value) / 2:  # also true for NaN
                unbounded.setdefault(tensor, number)
                continue
            seen = TensorRange(low, high)
            known = spans.get(tensor, seen)
            spans[tensor] = known.union(seen)
            magnitudes = (inner.get(tensor, 0.0), known.largest, *np.abs(value).astype(np.float64).tolist())
            below = (each for each in magnitudes if each < spans[tensor].largest / 4)
            inner[tensor] = max(below, default=0.0)
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
    return spans, means, by_sample, inner


def _quote(tensors: Sequence[str]) -> str:
    return list_text([f"'{tensor}'" for tensor in tensors], _LISTED)


_MOST_BYTES = 64 << 20
_CURE = 'give a calibration cache of a runtime, or JSON such as {"tensor": 6.0} or {"tensor": [-1.5, 6.0]}'


def given_ranges(
    path: Path, wanted: Collection[str], where: str, note: Callable[[str], None]
) -> dict[str, TensorRange]:
    """The ranges in a file for the wanted tensors; ``note`` receives the names of those without one.

    Raises `DataError` if it cannot be read, or has none of them: it belongs to another model than ``where`` then.
    """
    given = read_ranges(path)
    found = {tensor: given[tensor] for tensor in wanted if tensor in given}
    if wanted and not found:
        raise DataError(
            f"it has a scale for no tensor of {where}", where=path, cure="give that of this model"
        )
    if missing := sorted(set(wanted) - found.keys()):
        note(f"{path.name} has no scale for these, so they stay in floating point: {', '.join(missing)}")
    return found


def read_ranges(path: Path) -> dict[str, TensorRange]:
    """The range of each tensor in a file; raises `DataError` with the line or name that cannot be read."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise DataError("this is no file", where=path, cure=_CURE)
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"it is larger than {_MOST_BYTES >> 20} MiB", where=path, cure=_CURE)
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}", where=path, cure="check the path") from None
    try:
        caches = (read(data) for read in hooks.readers("ranges"))
        cache = next((found for found in caches if found is not None), None)
        if cache is not None:
            return {name: _symmetric(*found) for name, found in cache.items()}
        given = parse_json(data)
        if not isinstance(given, dict):
            raise ValueError("it is no table of tensors")
        return {name: _range(value, f"'{name:.60}'") for name, value in given.items()}
    except ValueError as error:
        raise DataError(f"the scales cannot be read: {error}", where=path, cure=_CURE) from None


def _range(value: object, where: str) -> TensorRange:
    if isinstance(value, list) and len(value) == 2:
        low, high = (_number(one, where) for one in value)
        if low > high:
            raise ValueError(f"{where}: {low:g} is above {high:g}")
        return TensorRange(low, high)
    return _symmetric(_number(value, where), where)


def _symmetric(largest: float, where: str) -> TensorRange:
    if not (math.isfinite(largest) and largest >= 0):
        raise ValueError(f"{where}: {largest:g} is no largest magnitude")
    return TensorRange(-largest, largest)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {value!r:.30} is no number")
    return float(value)
