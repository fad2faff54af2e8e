"""Changes between two runs: enumerated values, comparison with scipy, coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.testing.records import alone_case
from qdqspec.timing.stats import BuildTimes, change_between, ratio_interval, ratio_times, shift_bounds
from qdqspec.types import Interval, LatencyEvidence, Samples


def times(seed: int, *, slower: float = 1.0, builds: int = 3) -> BuildTimes:
    """A run on a machine whose speed varies by a tenth over its rounds."""
    random = np.random.default_rng(seed)
    drift = np.exp(0.1 * np.sin(np.linspace(0, 6, 24) + random.uniform(0, 6)))

    def build(level: float) -> tuple[float, ...]:
        own = level * np.exp(0.012 * random.standard_normal())
        return tuple(own * drift * np.exp(0.03 * random.standard_normal(24)))

    tuned, reference = (tuple(build(level) for _ in range(builds)) for level in (0.6 * slower, 1.0))
    return BuildTimes(tuned=tuned, reference=reference)


@given(st.integers(0, 10_000), st.integers(6, 60), st.integers(6, 60))
def test_scipy_rejects_exactly_the_shifts_outside_the_bounds(seed: int, many: int, others: int) -> None:
    random = np.random.default_rng(seed)
    ours, theirs = random.normal(1, 1, many), random.normal(0, 1, others)
    bounds = shift_bounds(ours, theirs)

    def rejected(shift: float, side: str) -> bool:
        # Without ties, the bounds are those of the approximation in scipy.
        found = scipy.stats.mannwhitneyu(ours - shift, theirs, method="asymptotic", alternative=side)
        return bool(found.pvalue <= 0.01)

    step = 1e-9
    assert rejected(bounds.low - step, "greater")
    assert not rejected(bounds.low + step, "greater")
    assert rejected(bounds.high + step, "less")
    assert not rejected(bounds.high - step, "less")
    assert bounds.low < bounds.median < bounds.high


@pytest.mark.parametrize("counts", [(2, 2), (3, 6), (9, 4)])
def test_the_interval_over_builds_is_that_of_welch(counts: tuple[int, int]) -> None:
    """Builds have constant times, which are their levels; scipy computes the expected interval."""
    random = np.random.default_rng(sum(counts))
    now, before = (np.exp(random.normal(0, 0.1, count)) for count in counts)
    runs = [BuildTimes(tuned=tuple((value,) * 5 for value in builds)) for builds in (now, before)]
    found = change_between(*runs).builds
    expected = scipy.stats.ttest_ind(np.log(now), np.log(before), equal_var=False)
    whole = scipy.stats.t.ppf(0.975, math.floor(expected.df)) / scipy.stats.t.ppf(0.975, expected.df)
    bounds = expected.confidence_interval(0.95)
    half = (bounds.high - bounds.low) / 2 * whole  # whole degrees of freedom, rounded down
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=1e-6)
    assert math.log(found.median) == pytest.approx(np.log(now).mean() - np.log(before).mean())
    p_value = scipy.stats.mannwhitneyu(np.repeat(now, 5), np.repeat(before, 5), method="asymptotic").pvalue
    assert change_between(*runs).p_value == pytest.approx(p_value)


def test_the_interval_covers_the_true_change_at_its_level() -> None:
    covered = 0
    for seed in range(300):
        found = change_between(times(2 * seed, slower=1.07), times(2 * seed + 1, builds=6)).builds
        covered += found.low <= 1.07 <= found.high
    assert 0.92 <= covered / 300 <= 0.985


def test_a_reference_that_is_selected_has_ratio_one_exactly() -> None:
    latency = alone_case().evidence.latency
    assert latency is not None
    same = ratio_times(latency)
    assert same.alone
    assert ratio_interval(same).low == ratio_interval(same).high == 1
    assert change_between(same, same).builds.high == 1
    assert change_between(same, times(1)).builds.low > 1.5


def test_a_ratio_is_the_mean_of_both_conditions_if_both_were_measured() -> None:
    def both(steady: float, first: float) -> Samples:
        return Samples(wall_ms=(steady,) * 4, first=Samples(wall_ms=(first,) * 4))

    latency = LatencyEvidence(
        clock="wall",
        samples={"tuned": both(2.0, 4.5), "reference": both(4.0, 9.0)},
        ratios={},
        speedup=Interval(median=2, low=2, high=2),
        builds=2,
    )
    found = ratio_times(latency)
    assert found.tuned == ((3.0, 3.0), (3.0, 3.0))
    assert found.reference == ((6.0, 6.0), (6.0, 6.0))
    assert ratio_times(latency, in_a_row=True).tuned == ((2.0, 2.0), (2.0, 2.0))


def test_the_change_of_the_reference_time_is_reported_with_that_of_the_ratio() -> None:
    before = BuildTimes(tuned=((1.0, 1.1), (0.9, 1.0)), reference=((2.0, 2.2), (1.8, 2.0)))
    slower = BuildTimes(
        tuned=((1.5, 1.65), (1.35, 1.5)), reference=tuple(tuple(1.5 * t for t in b) for b in before.reference)
    )
    assert change_between(slower, before).reference == pytest.approx(1.5)
    assert change_between(slower, before).builds.median == pytest.approx(1.0)
    alone = change_between(BuildTimes(tuned=slower.tuned), BuildTimes(tuned=before.tuned))
    assert alone.reference == 1.0
