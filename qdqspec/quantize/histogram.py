"""Histogram calibration: the percentile, entropy and squared-error methods of clipping a tensor's range.

Histograms have a fixed number of bins over a known range, so that memory is bounded whatever the number of samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Floats
from qdqspec.quantize.ranges import TensorRange

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

    The search of S. Migacz, "8-bit Inference with TensorRT", GTC 2017: for every number of bins kept, the tail is added
    to the last bin kept, the bins are merged into 128 levels and spread again over the non-empty ones, and the
    divergence of both is computed. Prefix sums give all thresholds at once.
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
    errors = [_squared_error(histogram, centers, limit) for limit in limits]
    best = int(np.argmin(errors))  # the first is the widest
    return _clip(histogram.span, float(limits[best]))


def _clip(span: TensorRange, limit: float) -> TensorRange:
    return TensorRange(max(span.low, -limit), min(span.high, limit))


def _squared_error(histogram: Histogram, centers: Floats, limit: float) -> float:
    low, high = max(histogram.span.low, -limit), min(histogram.span.high, limit)
    step = (high - low) / _MSE_STEPS
    clipped = np.clip(centers, low, high) - centers
    return float((histogram.counts * (clipped**2 + step**2 / 12)).sum())


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
