"""Task metrics on labelled data: built-in ones, and those of the caller. Higher is better.

Data and metrics are validated before anything is built, so that a typing error is reported before the search.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Shape, allows
from qdqspec._core.registry import did_you_mean, raising_line
from qdqspec._core.units import count_text
from qdqspec.accuracy.case_data import CaseData
from qdqspec.accuracy.compare import best_classes
from qdqspec.accuracy.data import Dataset, without_fill
from qdqspec.accuracy.evaluator import Runs, outputs_of
from qdqspec.backends import Engine
from qdqspec.errors import ConfigError, DataError, QdqspecError
from qdqspec.spec import source_lines
from qdqspec.types import AccuracyEvidence, Case, Metric

Batches: TypeAlias = Iterable[Mapping[str, Array]]

BUILT_IN = ("top1", "top5", "miou")  # as listed for people; any top<k> is valid
VOID = (-1, 255)  # classes of ignored pixels, as in Pascal VOC and Cityscapes

_TOP_K = re.compile(r"top([1-9]\d{0,3})")
_HOW = (
    "define it in a fixture qdq_metrics of a conftest.py: return {{'{name}': function}}, called as "
    "function(outputs, labels); from Python: Session(metrics={{...}})"
)


def fitting_metric(labels: Array, output: Sequence[int | None] | None) -> str:
    """The built-in metric for such labels and an output of this shape; empty if there is none."""
    if not np.issubdtype(labels.dtype, np.integer):
        return ""
    if labels.ndim == 1:
        return "top1"
    if output is None or len(output) != labels.ndim + 1:
        return ""
    places = {"top1": output[1:-1], "miou": output[2:]}
    order = ("top1", "miou") if labels.ndim == 2 else ("miou", "top1")  # tokens, else pixels
    return next((name for name in order if allows(places[name], labels.shape[1:])), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A metric that is counted batch by batch, by labels that are integers with at least ``axes`` axes.

    ``count`` gives the counts of a batch of scores and labels, ``value`` the metric by those of all batches; NaN if
    nothing counts.
    """

    axes: int
    labels: str
    cure: str
    count: Callable[[Array, Array], Array]
    value: Callable[[Sequence[Array]], float]

    def require(self, labels: Array) -> None:
        """Require labels that the metric can count."""
        if labels.ndim < self.axes or not np.issubdtype(labels.dtype, np.integer):
            what = f"labels are {labels.dtype} of shape {list(labels.shape)}, not {self.labels}"
            raise DataError(what, cure=self.cure)


def _count_right(scores: Array, labels: Array, k: int) -> Array:
    """Whether each label ``[batch, ...]`` is among the ``k`` highest scores ``[batch, ..., classes]``.

    Earlier classes win ties, NaN is wrong. Several labels per sample, as one for each token, count if not negative.
    """
    if labels.ndim > 1:
        _require_places(labels, scores.shape[:-1])
        counted = labels.astype(np.int64) >= 0
        scores, labels = scores[counted], labels[counted]
    elif sum(size > 1 for size in scores.shape[1:]) > 1:
        raise DataError(
            f"the output has values of shape {list(scores.shape[1:])} for each sample, which has one label",
            cure="name the output with the scores",
        )
    flat = scores.reshape(len(scores), math.prod(scores.shape[1:])).astype(np.float64)
    _check_classes(labels, flat.shape[1])
    is_best = (best_classes(flat, k, axis=1) == labels[:, None]).any(axis=1)
    return np.asarray(is_best & ~np.isnan(flat).any(axis=1))


def _share_right(counts: Sequence[Array]) -> float:
    right = np.concatenate(counts)
    return float(right.mean()) if right.size else math.nan


def _count_overlaps(scores: Array, labels: Array) -> Array:
    """By class the pixels that it has by scores ``[batch, classes, ...]`` and labels ``[batch, ...]``: by both, by any.

    Pixels labelled -1 or 255 do not count; a pixel with a NaN score is of no class.
    """
    _require_places(labels, (len(scores), *scores.shape[2:]))
    classes = scores.shape[1]
    unknown = np.isnan(scores.astype(np.float64)).any(axis=1)
    counted = ~np.isin(labels, VOID)
    seen = np.where(unknown, classes, scores.argmax(axis=1))[counted]
    wanted = np.asarray(labels[counted], np.int64)
    _check_classes(wanted, classes)
    both = np.bincount(wanted[seen == wanted], minlength=classes)
    by_seen, by_wanted = (np.bincount(each, minlength=classes)[:classes] for each in (seen, wanted))
    return np.array([both, by_seen + by_wanted - both])


def _mean_overlap(counts: Sequence[Array]) -> float:
    """Intersection over union, averaged over the classes that occur (Everingham et al., Pascal VOC)."""
    both, either = np.sum(counts, axis=0)
    occurs = either > 0
    return float((both[occurs] / either[occurs]).mean()) if occurs.any() else math.nan


def _require_places(labels: Array, places: Shape) -> None:
    if labels.shape != places:
        raise DataError(
            f"the output has scores for places {list(places)}, and the labels have {list(labels.shape)}",
            cure="give one integer for each place of the output, samples first",
        )


def _check_classes(labels: Array, classes: int) -> None:
    least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if least < 0 or most >= classes:
        worst = least if least < 0 else most
        raise DataError(
            f"label {worst} is no class of a model with {classes} scores",
            cure="number classes from 0, as the model does",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric's value over ``samples``; ``right`` is its result per sample, if the metric has one."""

    value: float
    samples: int
    right: npt.NDArray[np.bool_] | None = None


def built_in(name: str, own: Mapping[str, Metric]) -> BuiltIn | None:
    """The built-in metric of a name, ``None`` for one of the caller's ``own``.

    Raises `ConfigError` with the nearest name if it is neither.
    """
    if name in own:
        return None
    if (match := _TOP_K.fullmatch(name)) is not None:
        return BuiltIn(
            axes=0,
            labels="class numbers",
            cure="give one integer a sample, or use a metric of your own (fixture qdq_metrics)",
            count=partial(_count_right, k=int(match[1])),
            value=_share_right,
        )
    if name == "miou":
        return BuiltIn(
            axes=2,
            labels="class numbers of pixels",
            cure="give one integer for each place of the output, samples first",
            count=_count_overlaps,
            value=_mean_overlap,
        )
    known = (*own, *BUILT_IN)
    raise ConfigError(
        f"unknown metric '{name}'{did_you_mean(name, known)}",
        cure=f"known: {', '.join(known)}; {_HOW.format(name=name)}",
    )


def evaluate(
    name: str,
    outputs: Batches,
    labels: Array,
    *,
    output: str | None = None,
    own: Mapping[str, Metric] | None = None,
) -> Score:
    """Score a model's outputs with the caller's metric of that name, else with the built-in one.

    ``outputs`` are those of consecutive feeds, first axis the batch; ``labels`` has one entry per sample. ``output``
    names the one to score: without it a built-in metric uses the first, the caller's gets them all. Raises
    `ConfigError` for an unknown metric, `DataError` for unsuitable outputs, labels or metric values.
    """
    own = own or {}
    if (metric := built_in(name, own)) is None:
        return _of_own(name, own[name], outputs, labels, output)
    metric.require(_together(labels[:1]) if labels.dtype == object else labels)
    done, counts, is_by_sample = 0, list[Array](), name != "miou"
    for batch in outputs:  # so that outputs need not be in memory together
        scored = _named(batch, next(iter(batch)) if output is None else output)
        scores = batch[scored]
        if scores.ndim < 2:
            raise DataError(
                f"output '{scored}' has shape {list(scores.shape)}, which are no class scores a sample",
                cure="name the output with the scores",
            )
        chosen = labels[done : done + len(scores)]
        done += len(scores)
        if len(chosen) == len(scores):
            counts.append(metric.count(scores, chosen := _together(chosen)))
            is_by_sample &= chosen.ndim == 1
    if done != len(labels) or done == 0:
        what = f"the model gave {done} outputs for {len(labels)} labels"
        raise DataError(what, cure="give every sample one label")
    return Score(
        value=metric.value(counts), samples=done, right=np.concatenate(counts) if is_by_sample else None
    )


def _together(labels: Array) -> Array:
    """The labels of a feed, which are arrays if those of other feeds have other shapes, as one array."""
    if labels.dtype != object:
        return labels
    if len(shapes := {label.shape for label in labels}) > 1:
        listed = " and ".join(map(str, map(list, sorted(shapes))))
        raise DataError(f"labels of one batch have shapes {listed}", cure="give them one shape")
    return np.stack([*labels])


def _named(batch: Mapping[str, Array], name: str) -> str:
    if name not in batch:
        raise DataError(
            f"the model has no output '{name}'{did_you_mean(name, [*batch])}",
            cure=f"its outputs: {', '.join(batch)}",
        )
    return name


def _of_own(name: str, metric: Metric, outputs: Batches, labels: Array, output: str | None) -> Score:
    parts: dict[str, list[Array]] = {}
    for batch in outputs:
        for one in batch if output is None else (_named(batch, output),):
            parts.setdefault(one, []).append(batch[one])
    gathered: dict[str, Array] = {}
    for one, values in parts.items():
        shapes = {(value.shape[1:], value.dtype) for value in values if value.ndim}
        if len(shapes) == 1 and all(v.ndim for v in values) and sum(map(len, values)) == len(labels):
            gathered[one] = np.concatenate(values)
        else:  # the first axis does not count samples: an array of arrays, one for each feed
            gathered[one] = np.empty(len(values), dtype=object)
            for index, value in enumerate(values):
                gathered[one][index] = value
    shapes_text = ", ".join(
        f"{one} {len(values)} arrays, the first {list(values[0].shape)}"
        if values.dtype == object and len(values)  # an array for each feed
        else f"{one} {list(values.shape)}"
        for one, values in gathered.items()
    )
    cure = (
        f"it is called with outputs by name ({shapes_text}) and labels {list(labels.shape)}, and must return one "
        "number"
    )
    given = labels.view()
    given.flags.writeable = False  # the same labels are used again
    try:
        result: object = metric(gathered, given)
    except Exception as error:  # any error of the caller's code is reported by its name and position
        what = f"metric '{name}' raised {type(error).__name__}: {error}"
        raise DataError(what, where=raising_line(error, metric), cure=cure) from error
    if isinstance(result, np.ndarray) and result.ndim == 0:
        result = result.item()
    if isinstance(result, numbers.Real):
        return Score(value=float(result), samples=len(labels))
    kind = f"an array of shape {list(result.shape)}" if isinstance(result, np.ndarray) else repr(result)[:40]
    raise DataError(f"metric '{name}' gave {kind}, and one number is wanted", cure=cure)


@dataclass
class Scores:
    """Scores engines by the metrics of a case, its own and the built-in ones, on the evaluation data.

    ``build_reference`` builds the engine whose scores limits refer to, ``build`` an engine of a file.
    """

    case: Case
    data: CaseData
    build_reference: Callable[[], Engine]
    build: Callable[[Path], Engine]
    _known: dict[tuple[object, ...], Score | QdqspecError] = field(default_factory=dict, init=False)

    def require(self, metric: str, *, line: int | None = None) -> Dataset:
        """The labelled data of a metric; ``line`` is the line of the spec that names it.

        Raises `QdqspecError` if the metric cannot be computed.
        """
        try:
            built_in(metric, self.case.metrics)
        except QdqspecError as error:
            raise type(error)(error.what, where=self._place(metric, line), cure=error.cure) from None
        data = self.data.evaluation
        if data is None:
            raise DataError(
                "accuracy is asked for, and there is no evaluation data",
                where=self._place(metric, line),
                cure="name data with inputs and labels in inputs.evaluation",
            )
        data.require_labels()
        return data

    @property
    def feeds(self) -> int:
        """The number of runs of a score; 0 without data."""
        return 0 if self.data.evaluation is None else len(self.data.evaluation)

    @property
    def samples(self) -> int:
        """The number of samples of a score; 0 without data."""
        return 0 if self.data.evaluation is None else self.data.evaluation.samples

    def of_engine(
        self, engine: Runs, metric: str, output: str | None = None, *, feeds: int | None = None
    ) -> Score:
        """Run an engine on all samples, or on the first ``feeds``. Raises `BackendError` if the engine does not run."""
        data = self.require(metric)
        try:
            outputs, scored = self._outputs(data, engine, output, feeds)
            return evaluate(metric, outputs, data.labels_of(scored), output=output, own=self.case.metrics)
        except DataError as error:
            raise DataError(error.what, where=error.where or data.path, cure=error.cure) from error

    def _outputs(
        self, data: Dataset, engine: Runs, output: str | None, feeds: int | None
    ) -> tuple[Iterator[Mapping[str, Array]], int]:
        """Outputs for each feed, and the number of feeds; without samples that only pad the last batch.

        If an output has no batch axis, the padding cannot be removed: then the last batch is not scored.
        """
        wanted = len(data) if feeds is None else min(feeds, len(data))
        runs = outputs_of(engine, islice(data, wanted))
        if wanted * data.batch <= data.samples:  # no feed is padded
            return runs, wanted
        first = next(runs)
        used = [first[output]] if output in first else [*first.values()]
        every = chain([first], runs)
        if all(value.ndim and len(value) == data.batch for value in used):
            return map(partial(without_fill, data), count(), every), wanted
        if data.samples < data.batch:
            raise DataError(
                f"{count_text(data.samples, 'sample')} do not fill a batch of {data.batch}, and the outputs are not "
                "divided by samples",
                cure="give at least as many samples as the batch has",
            )
        rest = data.samples % data.batch
        self.data.note(
            f"the last {count_text(rest, 'sample')} of {data.samples} do not fill a batch of {data.batch} and are not "
            "scored: the outputs are not divided by samples"
        )
        return islice(every, data.samples // data.batch), data.samples // data.batch

    def of_file(self, path: Path | None, metric: str, output: str | None = None) -> Score:
        """Build a model, without ``path`` the reference, and score it; each file once, errors included."""
        key = path, metric, output
        if key not in self._known:
            self.require(metric)
            try:
                with closing(self.build_reference() if path is None else self.build(path)) as engine:
                    self._known[key] = self.of_engine(engine, metric, output)
            except QdqspecError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, QdqspecError):
            raise found
        return found

    def of_reference(self, metric: str, output: str | None = None) -> Score:
        """The score of the user's own model; raises `DataError` if it is not finite."""
        score = self.of_file(None, metric, output)
        if not math.isfinite(score.value):
            raise DataError(
                f"metric '{metric}' gave {score.value} for the model itself, so that no limit can be applied",
                where=self.require(metric).path,
                cure="look at its outputs and labels, or use another metric",
            )
        return score

    def evidence(self, tuned: Path, metric: str, output: str | None = None) -> AccuracyEvidence:
        """The scores of reference and tuned model compared; also sample by sample, if the metric supports it."""
        before, after = self.of_reference(metric, output), self.of_file(tuned, metric, output)
        lost = gained = None
        if before.right is not None and after.right is not None:
            lost = int((before.right & ~after.right).sum())
            gained = int((after.right & ~before.right).sum())
        return AccuracyEvidence(
            metric=metric,
            reference=before.value,
            tuned=after.value,
            samples=before.samples,
            lost=lost,
            gained=gained,
        )

    def _place(self, metric: str, line: int | None) -> str:
        """The line of the spec, by default the first one that names the metric; without a spec the model."""
        spec = self.case.spec
        if spec is None:
            return str(self.case.model)
        if line is None and spec.is_file():
            lines = source_lines(spec.read_text(encoding="utf-8", errors="replace"))
            line = next((number for number, text in enumerate(lines, 1) if metric in text), None)
        return str(spec) if line is None else f"{spec}:{line}"
