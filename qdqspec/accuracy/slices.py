"""The worst slice of an output along an axis: an error that the SQNR of the whole output does not show.

Boxes of hundreds and scores below one in one output share a scale: the output has 50 dB, and the scores have none left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Floats
from qdqspec.types import WorstSlice

_Bools: TypeAlias = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)


class SliceComparison:
    """Signal and noise power of each slice of one output along each of its axes, summed over samples.

    Axes are those that have the same length in all samples. The first of several is left out, as for classes: it counts
    samples, so that a slice would be one place of a batch. An axis with more than ``most_slices`` slices is left out:
    it lists positions, such as the anchors of a detector. The lowest of thousands of positions is one where nothing
    ever was, and is far below the whole in healthy models too. Memory is four numbers for each slice.
    """

    def __init__(self, most_slices: int = 1024) -> None:
        self._most = most_slices
        self._rank: int | None = None
        self._axes: dict[int, _Axis] = {}

    def add(self, reference: Floats, difference: Floats, finite: _Bools) -> None:
        """Add one sample: zeros where values are not ``finite``."""
        if self._rank is None:
            self._rank = reference.ndim
            lengths = dict(enumerate(reference.shape))
            if reference.ndim > 1:
                del lengths[0]
            self._axes = {axis: _Axis.of(n) for axis, n in lengths.items() if 1 < n <= self._most}
        lengths = dict(enumerate(reference.shape if reference.ndim == self._rank else ()))
        self._axes = {axis: one for axis, one in self._axes.items() if len(one.signal) == lengths.get(axis)}
        if reference.size:
            for axis, powers in self._axes.items():
                powers.add(_along(reference, axis), _along(difference, axis), _along(finite, axis))

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
        for axis, powers in self._axes.items():
            is_counted = (powers.count >= least_values) & (powers.signal > 0)
            is_counted &= powers.peak >= least_share * largest
            sqnr_db = powers.sqnr_db
            index = min(np.flatnonzero(is_counted), key=sqnr_db.__getitem__, default=None)
            if index is not None and (found is None or sqnr_db[index] < found.sqnr_db):
                found = WorstSlice(axis=axis, index=int(index), sqnr_db=float(sqnr_db[index]))
        return found


def _along(values: npt.NDArray[_T], axis: int) -> npt.NDArray[_T]:
    """The values with three axes, the second of them this one."""
    before, length = values.shape[:axis], values.shape[axis]
    return values.reshape(int(np.prod(before)), length, -1)


@dataclass(slots=True)
class _Axis:
    """The powers of the slices along an axis, their largest magnitudes and the numbers of their values."""

    signal: Floats
    noise: Floats
    peak: Floats
    count: npt.NDArray[np.int64]

    @classmethod
    def of(cls, length: int) -> _Axis:
        return cls(np.zeros(length), np.zeros(length), np.zeros(length), np.zeros(length, np.int64))

    def add(self, reference: Floats, difference: Floats, finite: _Bools) -> None:
        self.signal += np.einsum("anb,anb->n", reference, reference)
        self.noise += np.einsum("anb,anb->n", difference, difference)
        peak = np.maximum(reference.max(axis=(0, 2)), -reference.min(axis=(0, 2)))
        self.peak = np.maximum(self.peak, peak)
        self.count += finite.sum(axis=(0, 2))

    @property
    def sqnr_db(self) -> Floats:
        """The SQNR of each slice; infinite without noise."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = 10 * (np.log10(self.signal) - np.log10(self.noise))
        return found
