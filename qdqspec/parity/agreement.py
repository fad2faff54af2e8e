"""Top-k agreement: how many of the best classes two outputs share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array
from qdqspec.types import TopK

Classes = npt.NDArray[np.intp]  # one row for each classified position, best first

_FEW = 16  # best classes that are found one by one


@dataclass(slots=True)
class Agreement:
    """The running counts of common classes, for each of the ``tops``."""

    tops: Iterable[TopK]
    shared: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def add(self, reference: Array, tuned: Array) -> None:
        """Add one sample of an output; the shapes are equal. Changes this record."""
        for top in self.tops:
            axis = class_axis(reference.shape, top)
            if axis is not None:
                shared = in_common(reference, tuned, top.k, axis)
                self.shared[top.key] = self.shared.get(top.key, 0) + shared
                self.asked[top.key] = (
                    self.asked.get(top.key, 0) + reference.size // reference.shape[axis] * top.k
                )

    def result(self) -> dict[str, float]:
        """The share of the reference's best classes that are also the tuned model's, by `TopK.key`."""
        return {key: self.shared[key] / asked for key, asked in self.asked.items() if asked}


def class_axis(shape: tuple[int, ...], top: TopK) -> int | None:
    """The axis of the classes; ``None`` if there are at most ``k``, so that agreement is trivial."""
    if top.axis is not None:
        axis = top.axis if top.axis >= 0 else len(shape) + top.axis
        return axis if 0 <= axis < len(shape) and shape[axis] > top.k else None
    axes = range(1 if len(shape) > 1 else 0, len(shape))
    last = next((axis for axis in reversed(axes) if shape[axis] > 1), None)
    return last if last is not None and shape[last] > top.k else None


def in_common(reference: Array, tuned: Array, k: int, axis: int) -> int:
    """How many of the ``k`` best classes are the same, summed over all other axes, in any order."""
    ours, theirs = _best(reference, k, axis), _best(tuned, k, axis)
    return int((ours[:, :, None] == theirs[:, None, :]).sum())


def _best(scores: Array, k: int, axis: int) -> Classes:
    """The ``k`` best classes of each row. Earlier classes win ties, as in accuracy; NaN is the worst."""
    rows = np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis]).astype(np.float64)
    if k > _FEW or not np.isfinite(rows).all():
        return np.argsort(-rows, axis=1, kind="stable")[:, :k]
    found = np.empty((len(rows), min(k, rows.shape[1])), np.intp)
    for place in range(found.shape[1]):  # many classes need not be sorted for the few best
        found[:, place] = rows.argmax(axis=1)
        rows[np.arange(len(rows)), found[:, place]] = -np.inf
    return found
