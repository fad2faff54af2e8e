"""Task metrics on labelled data. Higher is better. May import floor 0 and numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from qdqspec.errors import DataError
from qdqspec.registry import did_you_mean

Array = npt.NDArray[np.generic]
Labels = npt.NDArray[np.int64]
Metric = Callable[[Array, Labels], npt.NDArray[np.bool_]]  # which samples of a batch are right


def accuracy(
    metric: str, outputs: Iterable[Mapping[str, Array]], labels: Array, *, output: str | None = None
) -> float:
    """The share of samples the model gets right, by ``top1`` or ``top5``.

    ``outputs`` are those of consecutive feeds, first axis the batch; ``labels`` one class number a sample.
    ``output`` names the one with the class scores, the first where it is None; trailing axes are
    flattened. Raises `DataError` for an unknown metric or output, and for labels that do not fit.
    """
    right_ones = _metric(metric)
    classes = _class_numbers(labels)
    right = done = 0
    for batch in outputs:
        scores = _scores(batch, output)
        chosen = classes[done : done + len(scores)]
        _check_fit(scores, chosen, len(classes))
        right += int(right_ones(scores, chosen).sum())
        done += len(scores)
    if done != len(classes) or done == 0:
        raise DataError(
            f"the model gave {done} outputs for {len(classes)} labels",
            cure="give every sample one label",
        )
    return right / done


def top_k(k: int) -> Metric:
    """Right where the label is among the ``k`` highest scores; earlier classes win ties, NaN is wrong."""

    def judge(scores: Array, labels: Labels) -> npt.NDArray[np.bool_]:
        order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
        known = ~np.isnan(scores.astype(np.float64)).any(axis=1)
        return np.asarray((order == labels[:, None]).any(axis=1) & known)

    return judge


METRICS: dict[str, Metric] = {"top1": top_k(1), "top5": top_k(5)}


def _metric(name: str) -> Metric:
    if name not in METRICS:
        raise DataError(
            f"unknown metric '{name}'{did_you_mean(name, tuple(METRICS))}",
            cure=f"known: {', '.join(METRICS)}",
        )
    return METRICS[name]


def _class_numbers(labels: Array) -> Labels:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}, not class numbers",
            cure="give one integer a sample",
        )
    return np.asarray(labels, dtype=np.int64)


def _scores(batch: Mapping[str, Array], output: str | None) -> Array:
    name = next(iter(batch)) if output is None else output
    if name not in batch:
        raise DataError(
            f"the model has no output '{name}'{did_you_mean(name, [*batch])}",
            cure=f"its outputs: {', '.join(batch)}",
        )
    found = batch[name]
    if found.ndim < 2:
        raise DataError(
            f"output '{name}' has shape {list(found.shape)}, which are no class scores a sample",
            cure="name the output with the scores",
        )
    return found.reshape(len(found), -1)


def _check_fit(scores: Array, labels: Labels, total: int) -> None:
    if len(labels) < len(scores):
        raise DataError(f"the model gave more outputs than the {total} labels", cure="give every sample one")
    if len(labels) and (labels.min() < 0 or labels.max() >= scores.shape[1]):
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(
            f"label {worst} is no class of a model with {scores.shape[1]} scores",
            cure="number classes from 0, as the model does",
        )
