"""Statistics of timings: enumerated and published values, comparison with scipy, coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, strategies as st

from qdqspec.testing.records import alone_case
from qdqspec.timing.stats import (
    BuildTimes,
    build_deviation,
    drift,
    estimate_ratios,
    shift_bounds,
    signed_rank_bounds,
    trimmed_error,
    trimmed_mean,
    wilcoxon_p,
)
from qdqspec.types import Interval, LatencyEvidence, Samples

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


@given(st.lists(SMALL, min_size=20, max_size=39), st.sampled_from([0.1, 0.2, 0.25, 0.4]))
def test_the_trimmed_mean_and_its_error_equal_those_of_scipy(values: list[float], share: float) -> None:
    """The error only if the share is a whole number of values: else scipy includes values that it did not trim."""
    assert trimmed_mean(values, share) == pytest.approx(scipy.stats.trim_mean(values, share), abs=1e-12)
    values = values[:20]
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


@pytest.mark.parametrize("roles", [2, 4])
def test_intervals_cover_the_true_ratio_in_95_of_100_cases(roles: int) -> None:
    random = np.random.default_rng(roles)
    found = [interval_of(measured(random, roles)[0]) for _ in range(1500)]
    ratio = LEVELS["tuned"] / LEVELS["reference"]
    assert 0.93 < np.mean([interval.low <= ratio <= interval.high for interval in found]) < 0.97


def test_drift_common_to_a_round_cancels_and_the_interval_of_one_build_per_role_is_unbounded() -> None:
    times, _ = measured(np.random.default_rng(5), 2)
    swing = np.exp(0.5 * np.sin(np.linspace(0, 3, ROUNDS)))
    still, moving = (interval_of({role: by * own for role, own in times.items()}) for by in (1.0, swing))
    assert (moving.low, moving.median, moving.high) == pytest.approx((still.low, still.median, still.high))
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
    steady, first = measured(np.random.default_rng(4), 2, caches=-0.3)
    found = estimate_ratios([steady, first], "reference")["tuned"].test
    apart = [interval_of(times) for times in (steady, first)]
    assert found.mean.median == pytest.approx(math.sqrt(apart[0].median * apart[1].median))
    assert found.enclosing.median == found.mean.median
    assert found.enclosing.low == min(one.low for one in apart)
    assert found.enclosing.high == max(one.high for one in apart)
    assert found.enclosing.low < 0.55 < found.mean.low < found.mean.high < 0.65 < found.enclosing.high
    same = estimate_ratios([steady], "reference")["tuned"].test
    assert same.mean == same.enclosing == apart[0]


# ---- predictions: measurements of another program at another time, with warm or cold caches -----------


LEVELS = {"reference": 26.0, "tuned": 18.0, "runner-up": 19.0, "everything": 20.0}
STEADY = (0.0, 1000)  # looks that show a steady machine
BUILDS, ROUNDS = 3, 24


def measured(
    random: np.random.Generator,
    roles: int,
    *,
    run: float = 0.03,
    first: float = 0.045,
    build: float = 0.012,
    state: float = 0.0,
    caches: float = 0.0,
) -> tuple[dict, dict]:
    """Times in a row and after another model, of fresh builds, in one state of the machine.

    The deviations are those of logarithms of runs, first runs, builds and states; ``caches`` is added to first runs of
    quantized models.
    """
    slowdown, steady, cold = state * random.standard_normal(), {}, {}
    for role, milliseconds in list(LEVELS.items())[:roles]:
        slower, more = (0.0, 0.0) if role == "reference" else (slowdown, caches)
        builds = math.log(milliseconds) + slower + build * random.standard_normal((BUILDS, 1))
        noise = random.standard_normal((2, BUILDS, ROUNDS))
        steady[role] = np.exp(builds + run * noise[0])
        cold[role] = np.exp(builds + more + first * noise[1])
    return steady, cold


def covered(
    times: tuple[float, int],
    roles: int = 4,
    seeds: int = 250,
    random: np.random.Generator | None = None,
    **machine: float,
) -> tuple[float, float]:
    """The shares of measurements of another program inside the prediction and inside the confidence interval."""
    random = random or np.random.default_rng(roles)
    inside = []
    for _ in range(seeds):
        steady, first = measured(random, roles, **machine)
        estimate = estimate_ratios([steady, first], "reference", 1, times)["tuned"]
        predicted, tested = estimate.predicted, estimate.test.enclosing
        for theirs in measured(random, 2, **machine):
            found = math.exp(np.median(np.log(theirs["tuned"] / theirs["reference"]), axis=1).mean())
            inside.append([each.low <= found <= each.high for each in (predicted, tested)])
    return tuple(np.mean(inside, axis=0))


@pytest.mark.parametrize(
    ("roles", "caches", "most"), [(2, 0.0, 0.975), (4, 0.0, 0.975), (4, 0.03, 0.99), (4, 0.08, 0.99)]
)
def test_predictions_cover_figures_of_other_programs_in_both_conditions(
    roles: int, caches: float, most: float
) -> None:
    predicted, tested = covered(STEADY, roles, caches=caches)
    assert 0.93 < predicted < most
    assert tested < predicted or caches


def test_predictions_cover_figures_of_other_programs_with_usual_states_without_looks() -> None:
    deviation, freedom = 0.008, 6  # the default of `estimate_ratios`
    random = np.random.default_rng(1)
    quiet = {"run": 0.01, "first": 0.01, "build": 0.003}
    inside = []
    for _ in range(40):
        state = deviation * math.sqrt(freedom / random.chisquare(freedom))
        inside.append(covered((0.0, 0), seeds=8, random=random, state=state, **quiet))
    predicted, tested = np.mean(inside, axis=0)
    assert 0.92 < predicted < 0.98
    assert tested < 0.8, "the confidence interval from one time"


# ---- changes between two runs -------------------------------------------------------------------------


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
def test_scipy_rejects_exactly_the_shifts_of_two_samples_outside_their_bounds(
    seed: int, many: int, others: int
) -> None:
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
    found = runs[0].change_from(runs[1]).builds
    expected = scipy.stats.ttest_ind(np.log(now), np.log(before), equal_var=False)
    whole = scipy.stats.t.ppf(0.975, math.floor(expected.df)) / scipy.stats.t.ppf(0.975, expected.df)
    bounds = expected.confidence_interval(0.95)
    half = (bounds.high - bounds.low) / 2 * whole  # whole degrees of freedom, rounded down
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=1e-6)
    assert math.log(found.median) == pytest.approx(np.log(now).mean() - np.log(before).mean())
    p_value = scipy.stats.mannwhitneyu(np.repeat(now, 5), np.repeat(before, 5), method="asymptotic").pvalue
    assert runs[0].change_from(runs[1]).p_value == pytest.approx(p_value)


def test_the_interval_covers_the_true_change_at_its_level() -> None:
    covered = 0
    for seed in range(300):
        found = times(2 * seed, slower=1.07).change_from(times(2 * seed + 1, builds=6)).builds
        covered += found.low <= 1.07 <= found.high
    assert 0.92 <= covered / 300 <= 0.985


def test_a_reference_that_is_selected_has_ratio_one_exactly() -> None:
    latency = alone_case().evidence.latency
    assert latency is not None
    same = BuildTimes.of(latency)
    assert same.alone
    assert same.interval.low == same.interval.high == 1
    assert same.change_from(same).builds.high == 1
    assert same.change_from(times(1)).builds.low > 1.5


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
    found = BuildTimes.of(latency)
    assert found.tuned == ((3.0, 3.0), (3.0, 3.0))
    assert found.reference == ((6.0, 6.0), (6.0, 6.0))


def test_the_change_of_the_reference_time_is_reported_with_that_of_the_ratio() -> None:
    before = BuildTimes(tuned=((1.0, 1.1), (0.9, 1.0)), reference=((2.0, 2.2), (1.8, 2.0)))
    slower = BuildTimes(
        tuned=((1.5, 1.65), (1.35, 1.5)), reference=tuple(tuple(1.5 * t for t in b) for b in before.reference)
    )
    assert slower.change_from(before).reference == pytest.approx(1.5)
    assert slower.change_from(before).builds.median == pytest.approx(1.0)
    alone = BuildTimes(tuned=slower.tuned).change_from(BuildTimes(tuned=before.tuned))
    assert alone.reference == 1.0
