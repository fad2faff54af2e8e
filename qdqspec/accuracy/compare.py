"""Compares outputs of the tuned model with the reference's, sample by sample, in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Feed, Floats
from qdqspec._core.units import count_text
from qdqspec.accuracy.data import Dataset, without_fill
from qdqspec.errors import DataError
from qdqspec.types import EXACT_DB, NO_NUMBER, NO_SIGNAL, ParityEvidence, TensorParity, TopK, WorstSlice

Outputs: TypeAlias = Mapping[str, Array]
_Bools: TypeAlias = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)
_Name = TypeVar("_Name")

_STEPS = 255  # of an 8-bit grid
_NUMBERS = "biuf"  # kinds of arrays that have a distance
_FEW = 16  # best classes that are found one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """The mean power of an output's values, and their bounds.

    An input with weaker outputs is judged against these. A quantization step is as large for an input of
    zeros as for any other, so that relative to its own outputs it would exceed each limit.
    """

    power: float = 0.0
    low: float = 0.0
    high: float = 0.0
    finite: bool = True  # whether no value was NaN or infinite


class SampleOutputs(NamedTuple):
    """The outputs for one sample: of the float model, of the tuned model, and of its arithmetic as ONNX defines it."""

    reference: Outputs
    tuned: Outputs
    arithmetic: Outputs | None = None


class OutputComparison:
    """Comparison of two models' outputs, sample by sample. ``tops`` requests agreement on classes too.

    SQNR is over all samples together; cosine and largest difference are the worst sample's. Outputs that are not floats
    must be equal; they have an SQNR if no output is a float. What cannot be compared is the worst possible result, with
    the reason in ``note``.
    """

    def __init__(self, tops: Iterable[TopK] = (), typical: Mapping[str, Typical] | None = None) -> None:
        self._tops = tuple(tops)
        self._typical = typical or {}
        self.outputs: dict[str, _Output] = {}

    def add(self, reference: Outputs, tuned: Outputs) -> None:
        """Add one sample."""
        for name, value in reference.items():
            if name not in self.outputs:
                self.outputs[name] = _Output(name, self._tops, self._typical.get(name, Typical()))
            self.outputs[name].add(np.asarray(value), tuned.get(name))

    def results(self) -> tuple[TensorParity, ...]:
        """The parity of each output, in the order of the reference's."""
        outputs, found = self.outputs.values(), [output.result() for output in self.outputs.values()]
        if any(output.is_float for output in outputs):
            return tuple(found)
        return tuple(
            replace(one, sqnr_db=-math.inf if output.note else sqnr_db(output.signal, output.noise))
            for one, output in zip(found, outputs, strict=True)
        )


def typical_of(runs: Iterable[Outputs]) -> dict[str, Typical]:
    """The statistics of each float output over all runs; values that are not finite do not count."""
    comparison = OutputComparison()
    for outputs in runs:
        comparison.add(outputs, outputs)
    return {
        name: Typical(
            power=out.signal / max(out.values, 1), low=out.low, high=out.high, finite=not out.is_odd
        )
        for name, out in comparison.outputs.items()
        if out.is_float
    }


def compare_outputs(
    runs: Iterable[SampleOutputs | tuple[Outputs, Outputs]],
    data: str,
    tops: Iterable[TopK] = (),
    typical: Mapping[str, Typical] | None = None,
    feeds: Iterable[Feed] = (),
) -> ParityEvidence:
    """Compare outputs over all samples; ``data`` names the source of the inputs. Raises `DataError` without a sample.

    If each run includes the arithmetic, quantization and runtime are compared separately. Runs of ``feeds`` that are
    batches of samples are divided into samples.
    """
    total, quantization, runtime = (OutputComparison(tops, typical) for _ in range(3))
    samples, divided = 0, True
    for number, run in enumerate(runs):
        for reference, tuned, arithmetic in by_sample(feeds, number, SampleOutputs(*run)):
            samples += 1
            total.add(reference, tuned)
            if arithmetic is None:
                divided = False
            else:
                quantization.add(reference, arithmetic)
                runtime.add(arithmetic, tuned)
    if not samples:
        raise DataError(
            f"there is no {data} sample to compare outputs on", cure="give `inputs.evaluation` a sample"
        )
    return ParityEvidence(
        outputs=total.results(),
        samples=samples,
        data=data,
        quantization=quantization.results() if divided else (),
        runtime=runtime.results() if divided else (),
    )


def by_sample(data: Iterable[Feed], number: int, run: SampleOutputs) -> Iterator[SampleOutputs]:
    """The outputs for each sample of a feed, without those that only fill up the last one.

    A feed whose outputs are not all divided by samples counts as one sample.
    """
    whole = SampleOutputs._make(outputs and without_fill(data, number, outputs) for outputs in run)
    if not divided_batch(data, number, run):
        yield whole
        return
    for row in range(min(map(len, whole.reference.values()))):
        yield SampleOutputs._make(
            outputs and {name: np.atleast_1d(value)[row : row + 1] for name, value in outputs.items()}
            for outputs in whole
        )


def divided_batch(data: Iterable[Feed], number: int, run: SampleOutputs) -> int:
    """The number of samples in a batch of which each output has one row a sample; 0 for others."""
    batch = max(data.batch, data.rows[number]) if isinstance(data, Dataset) else 1
    return batch if batch > 1 and {v.shape[:1] for v in run.reference.values()} == {(batch,)} else 0


class SliceComparison:
    """Signal and noise power of each slice of one output along each of its axes, summed over samples.

    The worst slice shows an error that the SQNR of the whole output does not: boxes of hundreds and scores below one in
    one output share a scale: the output has 50 dB, and the scores have none left.

    Axes are those that have the same length in all samples. The first of several is left out, as for classes: it counts
    samples, so that a slice would be one place of a batch. An axis with more than ``most_slices`` slices is left out:
    it lists positions, such as the anchors of a detector. The lowest of thousands of positions is one where nothing
    ever was, and is far below the whole in healthy models too.
    """

    def __init__(self, most_slices: int = 1024) -> None:
        self._most = most_slices
        self._rank: int | None = None
        # by axis: signal, noise, largest magnitude and number of values of each slice
        self._axes: dict[int, Floats] = {}

    def add(self, reference: Floats, difference: Floats, finite: _Bools) -> None:
        """Add one sample: zeros where values are not ``finite``."""
        lengths = dict(enumerate(reference.shape))
        if self._rank is None:
            self._rank = reference.ndim
            first = 1 if reference.ndim > 1 else 0
            self._axes = {
                axis: np.zeros((4, n)) for axis, n in lengths.items() if axis >= first and 1 < n <= self._most
            }
        if reference.ndim != self._rank:
            lengths = {}
        self._axes = {axis: one for axis, one in self._axes.items() if one.shape[1] == lengths.get(axis)}
        for axis, slices in self._axes.items() if reference.size else ():
            own, noise = _along(reference, axis), _along(difference, axis)
            slices[0] += np.einsum("anb,anb->n", own, own)
            slices[1] += np.einsum("anb,anb->n", noise, noise)
            peak = np.maximum(own.max(axis=(0, 2)), -own.min(axis=(0, 2)))
            slices[2] = np.maximum(slices[2], peak)
            slices[3] += _along(finite, axis).sum(axis=(0, 2))

    def worst(
        self, largest: float, *, least_values: int = 16, least_share: float = 1 / 4096
    ) -> WorstSlice | None:
        """The slice with the lowest SQNR; ``None`` if no slice has enough values and signal.

        ``largest`` is the largest magnitude in the output. A slice counts if it has ``least_values`` values over all
        samples: with fewer its SQNR is chance, and the lowest of many slices would be that of the unluckiest. Its
        largest magnitude must be ``least_share`` of the output's: scores up to 1 beside coordinates in images of 4096
        pixels count; padded channels, channels that are always off and classes that never occur do not.
        """
        found: WorstSlice | None = None
        for axis, (signal, noise, peak, count) in self._axes.items():
            is_counted = (count >= least_values) & (signal > 0) & (peak >= least_share * largest)
            with np.errstate(divide="ignore", invalid="ignore"):
                slice_db = 10 * (np.log10(signal) - np.log10(noise))
            index = min(np.flatnonzero(is_counted), key=slice_db.__getitem__, default=None)
            if index is not None and (found is None or slice_db[index] < found.sqnr_db):
                found = WorstSlice(axis=axis, index=int(index), sqnr_db=float(slice_db[index]))
        return found


def _along(values: npt.NDArray[_T], axis: int) -> npt.NDArray[_T]:
    """The values with three axes, the second of them this one."""
    return values.reshape(math.prod(values.shape[:axis]), values.shape[axis], -1)


@dataclass(slots=True)
class _Output:
    """The running statistics of one output."""

    name: str
    tops: tuple[TopK, ...]
    typical: Typical
    # by `TopK.key`: common ones, and all compared
    classes: dict[str, list[int]] = field(default_factory=dict)
    slices: SliceComparison = field(default_factory=SliceComparison)
    values: int = 0
    is_float: bool = True
    is_single: bool = True
    is_odd: bool = False  # whether a value was NaN or infinite, in both outputs
    note: str = ""  # of the first sample that cannot be compared
    unequal: int = 0
    signal: float = 0.0
    noise: float = 0.0
    low: float = 0.0
    high: float = 0.0
    max_abs: float = 0.0
    cosine: float = 1.0

    def add(self, reference: Array, tuned: Array | None) -> None:
        """Add one sample. Changes this output."""
        self.is_float = bool(np.issubdtype(reference.dtype, np.floating))
        self.is_single = self.is_single and reference.size == 1
        self.note = self.note or _mismatch(reference, tuned)
        if self.note or tuned is None:
            return
        if not self.is_float:
            self.unequal += int(np.count_nonzero(reference != tuned))
            if reference.dtype.kind in _NUMBERS:
                self.signal += signal_power(reference)
                self.noise += noise_power(reference, tuned)
            return
        for top in self.tops:
            axis = class_axis(reference.shape, top)
            if axis is not None:
                counts = self.classes.setdefault(top.key, [0, 0])
                counts[0] += in_common(reference, tuned, top.k, axis)
                counts[1] += reference.size // reference.shape[axis] * top.k
        # Where both are the same infinity or both NaN, as in masked scores, there is nothing to compare.
        finite, counted = np.isfinite(reference), are_values(reference)
        both = (np.where(finite, values, 0).astype(np.float64) for values in (reference, tuned))
        difference = np.subtract(*both)
        own = np.where(counted, reference, 0).astype(np.float64)
        self.slices.add(own, difference, counted)
        self.is_odd = self.is_odd or not finite.all()
        if finite.any():
            self.values += int(np.count_nonzero(counted))
            self.signal += _square_sum(own)
            self.noise += _square_sum(difference)
            self.max_abs = max(self.max_abs, float(np.abs(difference).max()))
            self.low = min(self.low, float(own.min()))
            self.high = max(self.high, float(own.max()))
            self.cosine = min(self.cosine, _cosine(own.ravel(), (own - difference).ravel()))

    def result(self) -> TensorParity:
        """The parity over all samples added."""
        inf, note = math.inf, self.note
        equal = TensorParity(name=self.name, sqnr_db=inf, cosine=1.0, max_abs=0.0, max_steps=0.0)
        if not self.is_float:
            note = note or (f"{self.unequal} values differ" if self.unequal else "")
            return replace(equal, compared=False, matches=not note, note=note)
        if note:
            worst = replace(equal, sqnr_db=-inf, cosine=-1.0, max_abs=inf, max_steps=inf)
            return replace(worst, matches=False, note=note)
        if self.is_odd and not self.values:
            return replace(equal, compared=False, note=NO_NUMBER)
        high, low = max(self.high, self.typical.high), min(self.low, self.typical.low)
        step = (high - low) / _STEPS
        return TensorParity(
            name=self.name,
            sqnr_db=sqnr_db(max(self.signal, self.typical.power * self.values), self.noise),
            cosine=self.cosine,
            max_abs=self.max_abs,
            max_steps=self.max_abs / step if step > 0 else inf if self.max_abs else 0.0,
            agreement={key: common / all_of for key, (common, all_of) in self.classes.items() if all_of},
            note="" if self.signal or self.noise or not self.values else NO_SIGNAL,
            is_single=self.is_single,
            worst_slice=self.slices.worst(max(high, -low)),
        )


def require_numbers(runs: Collection[tuple[Feed, Outputs]]) -> None:
    """Raise `DataError` if inputs with infinite values are the cause that an output has no number in any sample."""
    odd = {name for feed, _ in runs for name, value in feed.items() if not _finite(value).all()}
    outputs = {name for _, outputs in runs for name in outputs}
    for output in sorted(outputs) if odd else ():
        values = [outputs[output] for _, outputs in runs if output in outputs]
        if any(value.size for value in values) and not any(_finite(value).any() for value in values):
            names = ", ".join(f"'{name}'" for name in sorted(odd))
            raise DataError(
                f"output '{output}' of the model is NaN or infinite in each of {count_text(len(runs), 'sample')}, in "
                f"which these inputs have infinite values: {names}",
                cure="leave at least one value in each row of a mask, or use values that the model can compute with",
            )


def _finite(values: Array) -> _Bools:
    """A mask of finite values: all of them if they are not floats."""
    is_float = np.issubdtype(values.dtype, np.floating)
    return np.isfinite(values) if is_float else np.ones(values.shape, np.bool_)


def sqnr_db(signal: float, noise: float) -> float:
    """Ten times the log of signal power over noise power; infinite without noise, even without signal."""
    if noise == 0:
        return math.inf
    # As a difference, since the ratio of two powers may exceed the range of a float.
    return 10 * (math.log10(signal) - math.log10(noise)) if signal > 0 else -math.inf


def sqnr_of_runs(expected: Sequence[Array], seen: Sequence[Array | None]) -> float:
    """The SQNR of an output over all runs; one that has no signal in any of them is equal if it can be compared."""
    signal = sum(map(signal_power, expected))
    noise = sum(noise_power(one, other) for one, other in zip(expected, seen, strict=True))
    found = EXACT_DB if not signal and noise < math.inf else sqnr_db(signal, noise)
    return float(np.clip(found, -EXACT_DB, EXACT_DB))


def judged(outputs: Mapping[_Name, Array]) -> dict[_Name, Array]:
    """The outputs whose SQNR counts: floats, or all numbers of a model that has no float output.

    Integers beside floats may be indices: of equal scores the least noise exchanges them.
    """
    floats = {name: values for name, values in outputs.items() if np.issubdtype(values.dtype, np.floating)}
    return floats or {name: values for name, values in outputs.items() if values.dtype.kind in _NUMBERS}


def signal_power(reference: Array) -> float:
    """The sum of the squares of the finite values that are no masks."""
    counted = are_values(reference)
    return _square_sum(reference if counted.all() else reference[counted])


def are_values(reference: Array) -> _Bools:
    """A mask of finite values below nine tenths of the largest number of their type.

    Beyond are the masks of scores, such as -3.4e38: as signal they would hide any error of the other values.
    """
    if not np.issubdtype(reference.dtype, np.floating):
        return np.ones(reference.shape, np.bool_)
    return np.abs(reference) < 0.9 * float(np.finfo(str(reference.dtype)).max)


def noise_power(reference: Array, seen: Array | None) -> float:
    """The sum of squared differences where the reference is finite.

    Infinite if the values cannot be compared, or differ where the reference is NaN or infinite.
    """
    if seen is None or seen.shape != reference.shape:
        return math.inf
    finite = np.isfinite(reference)
    if not finite.all():
        if not np.array_equal(reference[~finite], seen[~finite], equal_nan=True):
            return math.inf
        reference, seen = reference[finite], seen[finite]
    noise = _square_sum(np.subtract(reference, seen, dtype=np.float64))
    return noise if math.isfinite(noise) else math.inf


def _square_sum(values: Array) -> float:
    """The sum of squares in float64, without BLAS, whose waiting threads would use CPU time."""
    flat = np.asarray(values, np.float64).ravel()
    return float(np.einsum("i,i->", flat, flat))


def power_of(sqnr_db: float) -> float:
    """Noise power over signal power."""
    return float(10 ** (-sqnr_db / 10))


def _mismatch(reference: Array, tuned: Array | None) -> str:
    """The reason why two outputs cannot be compared value by value; empty if they can."""
    if tuned is None:
        return "the tuned model does not give this output"
    if reference.shape != tuned.shape:
        return f"shape {list(tuned.shape)} instead of {list(reference.shape)}"
    if not all(np.issubdtype(values.dtype, np.floating) for values in (reference, tuned)):
        return "" if reference.dtype == tuned.dtype else f"type {tuned.dtype} instead of {reference.dtype}"
    odd = ~np.isfinite(reference)
    if not np.isfinite(tuned[~odd]).all():
        return "NaN or infinite values where the reference has none"
    if not np.array_equal(reference[odd], tuned[odd], equal_nan=True):
        return "other values where the reference is NaN or infinite"
    return ""


def _cosine(reference: Floats, tuned: Floats) -> float:
    """The cosine similarity: exactly 1 if both are equal, also if both are zero; -1 if it is not defined."""
    if np.array_equal(reference, tuned):
        return 1.0
    from polygraphy.comparator import CosineSimilarityCompareFunc, IterationResult
    from polygraphy.logger import G_LOGGER

    results = [IterationResult({"output": values}) for values in (reference, tuned)]
    # Its verdicts use its own tolerances; without this it prints them.
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(all="ignore"):
        found = CosineSimilarityCompareFunc()(*results)["output"].metric_values()["cosine_similarity"]
    return -1.0 if math.isnan(found) else float(found)


def class_axis(shape: tuple[int, ...], top: TopK) -> int | None:
    """The axis of the classes; ``None`` if there are at most ``k``, so that agreement is trivial."""
    if top.axis is not None:
        axis = top.axis if top.axis >= 0 else len(shape) + top.axis
        return axis if 0 <= axis < len(shape) and shape[axis] > top.k else None
    axes = range(1 if len(shape) > 1 else 0, len(shape))
    last = next((axis for axis in reversed(axes) if shape[axis] > 1), None)
    return last if last is not None and shape[last] > top.k else None


def in_common(reference: Array, tuned: Array, k: int, axis: int) -> int:
    """The number of the ``k`` best classes that are the same, summed over all other axes, in any order."""
    ours, theirs = best_classes(reference, k, axis), best_classes(tuned, k, axis)
    return int((ours[:, :, None] == theirs[:, None, :]).sum())


def best_classes(scores: Array, k: int, axis: int) -> npt.NDArray[np.intp]:
    """The ``k`` best classes of each row, best first. Earlier classes win ties, as in accuracy; NaN is the worst."""
    rows = np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis]).astype(np.float64)
    if k > _FEW or not np.isfinite(rows).all():
        return np.argsort(-rows, axis=1, kind="stable")[:, :k]
    found = np.empty((len(rows), min(k, rows.shape[1])), np.intp)
    for place in range(found.shape[1]):  # many classes need not be sorted for the few best
        found[:, place] = rows.argmax(axis=1)
        rows[np.arange(len(rows)), found[:, place]] = -np.inf
    return found
