"""The built-in metrics, computed batch by batch. Higher is better."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array
from qdqspec.errors import DataError

Counts = npt.NDArray[np.int64]
Right = npt.NDArray[np.bool_]

BUILT_IN = ("top1", "top5", "miou")  # as listed for people; any top<k> is valid
VOID = (-1, 255)  # classes of ignored pixels, as in Pascal VOC and Cityscapes

_TOP_K = re.compile(r"top([1-9]\d{0,3})")


class Tally(Protocol):
    """A metric that is computed batch by batch."""

    def require(self, labels: Array) -> None:
        """Raise `DataError` if the labels of all samples are not suitable for the metric."""
        ...

    def add(self, scores: Array, labels: Array) -> None:
        """Add a batch: scores with the samples first, and one label per sample."""
        ...

    @property
    def value(self) -> float:
        """The metric over all batches added."""
        ...

    @property
    def right(self) -> Right | None:
        """Which samples are right; ``None`` if the metric has no result per sample."""
        ...


def tally_named(name: str) -> Callable[[], Tally] | None:
    """The class of a built-in metric; ``None`` if there is none of that name."""
    if (match := _TOP_K.fullmatch(name)) is not None:
        k = int(match[1])
        return lambda: TopKAccuracy(k)
    return MeanIoU if name == "miou" else None


class TopKAccuracy:
    """The share of samples whose label is among the ``k`` highest scores.

    Earlier classes win ties, NaN is wrong; axes after the second are flattened into it.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._right: list[Right] = []

    def require(self, labels: Array) -> None:
        """Require one class number per sample."""
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}, not class numbers",
                cure="give one integer a sample",
            )

    def add(self, scores: Array, labels: Array) -> None:
        """Add class scores ``[batch, classes]`` and class numbers ``[batch]``."""
        flat = scores.reshape(len(scores), -1).astype(np.float64)
        _check_classes(labels, flat.shape[1])
        order = np.argsort(-flat, axis=1, kind="stable")[:, : self._k]
        known = ~np.isnan(flat).any(axis=1)
        self._right.append(np.asarray((order == labels[:, None]).any(axis=1) & known))

    @property
    def value(self) -> float:
        """Share of right samples."""
        return float(self.right.mean())

    @property
    def right(self) -> Right:
        """Which samples are right."""
        return np.concatenate(self._right)


class MeanIoU:
    """Intersection over union of pixels, averaged over the classes that occur (Everingham et al., Pascal VOC).

    Pixels labelled -1 or 255 do not count; a pixel with a NaN score is of no class.
    """

    right = None

    def __init__(self) -> None:
        self._both: Counts | None = None  # by class
        self._either: Counts | None = None

    def require(self, labels: Array) -> None:
        """Require class numbers for the pixels of each sample."""
        if labels.ndim < 2 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}, not class numbers of pixels",
                cure="give one integer for each place of the output, samples first",
            )

    def add(self, scores: Array, labels: Array) -> None:
        """Add scores ``[batch, classes, ...]`` and class numbers ``[batch, ...]`` of the same positions."""
        places = (len(scores), *scores.shape[2:])
        if labels.shape != places:
            raise DataError(
                f"the output has scores for places {list(places)}, and the labels have {list(labels.shape)}",
                cure="give one integer for each place of the output, samples first",
            )
        classes = scores.shape[1]
        unknown = np.isnan(scores.astype(np.float64)).any(axis=1)
        seen = np.where(unknown, classes, scores.argmax(axis=1))
        counted = ~np.isin(labels, VOID)
        wanted = np.asarray(labels[counted], np.int64)
        _check_classes(wanted, classes)
        self._count(seen[counted], wanted, classes)

    def _count(self, seen: Counts, wanted: Counts, classes: int) -> None:
        both = np.bincount(wanted[seen == wanted], minlength=classes)
        either = (
            np.bincount(wanted, minlength=classes) + np.bincount(seen, minlength=classes)[:classes] - both
        )
        self._both = both if self._both is None else self._both + both
        self._either = either if self._either is None else self._either + either

    @property
    def value(self) -> float:
        """The mean over classes; NaN if no pixel counts."""
        if self._both is None or self._either is None or not self._either.any():
            return float("nan")
        occurs = self._either > 0
        return float((self._both[occurs] / self._either[occurs]).mean())


def _check_classes(labels: Array, classes: int) -> None:
    if len(labels) and (labels.min() < 0 or labels.max() >= classes):
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(
            f"label {worst} is no class of a model with {classes} scores",
            cure="number classes from 0, as the model does",
        )
