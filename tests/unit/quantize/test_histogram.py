from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.arrays import evenly_spaced
from qdqspec.qdq.quantize.calibrate import BINS, Histogram, _divergences, mse_range, percentile_range
from qdqspec.qdq.quantize.ranges import TensorRange


def histogram_of(values: np.ndarray) -> Histogram:
    histogram = Histogram(TensorRange(float(values.min()), float(values.max())))
    histogram.add(values)
    return histogram


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), most=st.integers(1, 60))
def test_evenly_spaced_values_are_limited_and_cover_every_axis(shape: list[int], most: int) -> None:
    places = np.indices(shape).reshape(len(shape), *shape)
    found = [evenly_spaced(axis, most) for axis in places]
    assert 1 <= found[0].size <= most
    assert found[0].size == places[0].size or places[0].size > most
    if found[0].size >= shape[-1]:
        assert set(found[-1].tolist()) == set(range(shape[-1]))


def test_the_percentile_range_contains_that_share_of_the_values() -> None:
    values = np.random.default_rng(1).standard_normal(200_000)
    span = percentile_range(histogram_of(values), 99.0)
    inside = ((values >= span.low) & (values <= span.high)).mean()
    assert 0.99 <= inside < 0.992
    assert span.low == pytest.approx(-2.576, abs=0.05)
    assert span.high == pytest.approx(2.576, abs=0.05)


def test_the_mse_range_equals_that_of_a_direct_search() -> None:
    values = np.random.default_rng(2).laplace(size=50_000)
    span = mse_range(histogram_of(values))

    def error(limit: float) -> float:
        step = 2 * limit / 255
        return float(np.mean((np.clip(np.rint(values / step) * step, -limit, limit) - values) ** 2))

    limits = np.linspace(1, np.abs(values).max(), 200)
    assert error(max(-span.low, span.high)) <= min(map(error, limits)) * 1.03


def test_the_entropy_range_equals_that_of_the_published_search() -> None:
    """Prefix sums result in the same divergence for each threshold as the published steps."""
    random = np.random.default_rng(3)
    counts = np.histogram(np.abs(random.laplace(size=3000)), bins=BINS)[0].astype(
        float
    )  # many bins are empty
    fast = _divergences(counts)
    for kept in (128, 129, 500, 1023, 2000, 2047, 2048):
        assert fast[kept] == pytest.approx(published_divergence(counts, kept), rel=1e-9)
    assert np.isinf(fast[:128]).all()


def published_divergence(counts: np.ndarray, kept: int) -> float:
    reference = counts[:kept].copy()
    reference[-1] += counts[kept:].sum()
    candidate = np.zeros(kept)
    for level in range(128):
        part = slice(kept * level // 128, kept * (level + 1) // 128)
        filled = reference[part] > 0
        if filled.any():
            candidate[part][filled] = counts[:kept][part].sum() / filled.sum()
    reference, candidate = reference / reference.sum(), candidate / candidate.sum()
    filled = reference > 0
    if (candidate[filled] == 0).any():
        return float("inf")
    return float((reference[filled] * np.log(reference[filled] / candidate[filled])).sum())
