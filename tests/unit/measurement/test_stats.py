"""Statistics of paired timings: enumerated and published values, comparison with scipy, coverage by simulation."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.timing.stats import (
    build_deviation,
    drift,
    estimate_ratios,
    signed_rank_bounds,
    trimmed_error,
    trimmed_mean,
    wilcoxon_p,
)
from qdqspec.types import Interval

SMALL = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 6))


def test_the_p_value_is_the_share_of_signs_that_are_as_extreme_and_zeros_do_not_count() -> None:
    for count in range(10):
        assert wilcoxon_p(range(1, count + 1)) == min(1.0, 2 / 2**count)
        assert wilcoxon_p([0.0, *range(1, count + 1), 0.0]) == min(1.0, 2 / 2**count)


@pytest.mark.parametrize("count", [6, 7, 12, 24])
@pytest.mark.parametrize("seed", range(3))
def test_scipy_rejects_exactly_the_shifts_outside_the_bounds(count: int, seed: int) -> None:
    values = np.random.default_rng([seed, count]).normal(0.1, 1, count)
    bounds = signed_rank_bounds(values)
    assert bounds.low <= bounds.median <= bounds.high

    def p_value(shift: float) -> float:
        return float(scipy.stats.wilcoxon(values - shift, method="exact").pvalue)

    for bound, outwards in ((bounds.low, -1e-9), (bounds.high, 1e-9)):
        assert p_value(bound + outwards) <= 0.05 < p_value(bound - outwards)


@given(st.lists(SMALL, min_size=1, max_size=50), st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.4]))
def test_the_trimmed_mean_equals_that_of_scipy(values: list[float], share: float) -> None:
    assert trimmed_mean(values, share) == pytest.approx(scipy.stats.trim_mean(values, share), abs=1e-12)


@given(st.lists(SMALL, min_size=20, max_size=20), st.sampled_from([0.1, 0.2, 0.25, 0.4]))
def test_the_error_of_a_trimmed_mean_equals_that_of_scipy(values: list[float], share: float) -> None:
    """Only if the share is a whole number of values; otherwise scipy includes values that it did not trim."""
    expected = scipy.stats.mstats.trimmed_stde(np.array(values), limits=(share, share))
    assert trimmed_error(values, share) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("run", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("build", [0.0, 0.012, 0.03])
def test_the_deviation_between_builds_excludes_that_of_runs(build: float, run: float) -> None:
    """On a busy machine the deviation of runs is most of that of build levels. Drift is not part of it either."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(300):
        levels = build * random.standard_normal((5, 1))
        drift = 0.3 * np.linspace(0, 1, 12)
        found.append(build_deviation(np.exp(levels + drift + run * random.standard_normal((5, 12)))))
    runs_alone = run / math.sqrt(12)
    assert np.mean(found) == pytest.approx(build, abs=0.1 * build + 0.45 * runs_alone)
    assert np.mean(np.square(found)) <= build**2 + 0.5 * runs_alone**2 + 0.1 * build**2


def interval_of(steady) -> Interval:
    """The confidence interval of the ratio of the tuned model."""
    return estimate_ratios([steady], "reference")["tuned"].test.mean


def rounds(random: np.random.Generator, levels: dict[str, float], drift=0.0) -> dict[str, list[np.ndarray]]:
    """Interleaved samples of three builds: level, deviation of the build, deviation of the round, run noise."""
    swing = drift * np.sin(np.linspace(0, 3, 24))
    noise = {role: 0.012 * random.normal(size=(3, 1)) + 0.03 * random.normal(size=(3, 24)) for role in levels}
    return {role: list(level * np.exp(swing + noise[role])) for role, level in levels.items()}


@pytest.mark.parametrize("roles", [2, 4])
def test_intervals_cover_the_true_ratio_in_95_of_100_cases(roles: int) -> None:
    random = np.random.default_rng(roles)
    levels = {"reference": 4.0, "tuned": 3.0, "runner-up": 3.2, "everything": 5.0}
    chosen = dict(list(levels.items())[:roles])
    found = [interval_of(rounds(random, chosen)) for _ in range(1500)]
    covered = np.mean([interval.low <= 0.75 <= interval.high for interval in found])
    assert 0.93 < covered < 0.97


def test_drift_common_to_a_round_cancels() -> None:
    levels = {"reference": 4.0, "tuned": 3.0}
    still = interval_of(rounds(np.random.default_rng(5), levels))
    moving = interval_of(rounds(np.random.default_rng(5), levels, drift=0.5))
    assert moving.median == pytest.approx(still.median, rel=1e-9)
    assert (moving.low, moving.high) == pytest.approx((still.low, still.high), rel=1e-9)


def test_the_interval_of_one_build_per_role_is_unbounded() -> None:
    interval = interval_of({"reference": [[4.0, 4.1]], "tuned": [[3.0, 3.1]]})
    assert (interval.low, interval.high) == (0.0, math.inf)
    assert 0.7 < interval.median < 0.8


def test_drift_is_separated_from_rounds_but_not_from_single_builds() -> None:
    rng = np.random.default_rng(0)
    slower = 1 + np.linspace(0, 0.12, 30)
    builds = [level * slower * rng.lognormal(0, 0.01, 30) for level in (1.0, 2.0, 0.5)]
    assert drift(builds) == pytest.approx(0.08, abs=0.02)
    assert abs(drift([rng.lognormal(0, 0.01, 30) for _ in range(3)])) < 0.02
    assert drift([[1.0], [2.0]]) == 0


def test_an_estimate_has_the_interval_of_the_mean_and_the_one_that_encloses_both_conditions() -> None:
    random = np.random.default_rng(4)
    steady = rounds(random, {"reference": 10.0, "tuned": 9.8})
    first = rounds(random, {"reference": 11.0, "tuned": 7.7})
    found = estimate_ratios([steady, first], "reference")["tuned"].test
    apart = [interval_of(times) for times in (steady, first)]
    assert found.mean.median == pytest.approx(math.sqrt(apart[0].median * apart[1].median))
    assert found.enclosing.median == found.mean.median
    assert found.enclosing.low == min(one.low for one in apart)
    assert found.enclosing.high == max(one.high for one in apart)
    assert found.enclosing.low < 0.72 < 0.8 < found.mean.low < found.mean.high < 0.9 < 0.95
    assert found.enclosing.high > 0.95
    same = estimate_ratios([steady], "reference")["tuned"].test
    assert same.mean == same.enclosing == apart[0]


def test_scipy_is_imported_in_the_background_on_demand_only() -> None:
    program = """
import sys, threading
from qdqspec.timing import stats
assert "scipy" not in sys.modules
stats.preload_scipy()
(thread,) = (each for each in threading.enumerate() if each is not threading.main_thread())
thread.join()
assert "scipy.stats" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
