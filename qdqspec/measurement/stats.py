"""Statistics for paired timings. Pure functions.

scipy is imported by the functions that call it: it takes up to a second, and runs that measure nothing do not need it
(docs/decisions/0043).

A confidence interval answers whether a gain is proved by this measurement. A figure that is measured again, with other
builds, in another program, at another time, has noise of its own, which a confidence interval does not include. The
intervals that are reported do: 95 % prediction intervals (`predicted_ratios`, docs/decisions/0045).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from threading import Thread
from typing import TypeAlias

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.types import Interval, RatioTest

FEWEST_FREEDOM = 3  # of a deviation between times that a test takes into account
Variance: TypeAlias = tuple[float, int]  # of a logarithm, with its degrees of freedom
EXACT_LIMIT = 30  # pairs up to which the p-value of the signed-rank test is exact


def preload_scipy() -> None:
    """Import scipy in the background, for a caller that will need its tests and waits for engines first."""
    Thread(target=import_module, args=("scipy.stats",), name="qdqspec-import").start()


def trimmed_mean(values: Sequence[float] | Floats, share: float = 0.2) -> float:
    """The trimmed mean: without the lowest and highest ``share`` of the values (each side)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(len(ordered) * share)
    return float(ordered[cut : len(ordered) - cut].mean())


def trimmed_error(values: Sequence[float] | Floats, share: float = 0.2) -> float:
    """Standard error of `trimmed_mean`, from the winsorized standard deviation.

    Tukey and McLaughlin (1963). Needs at least two values.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(len(ordered) * share)
    moved = np.clip(ordered, ordered[cut], ordered[len(ordered) - cut - 1])
    return float(moved.std(ddof=1)) / ((1 - 2 * cut / len(ordered)) * math.sqrt(len(ordered)))


def log_ratios(challenger: Sequence[float], incumbent: Sequence[float]) -> Floats:
    """Natural logarithms of the pairwise time ratios."""
    return np.log(np.asarray(challenger, dtype=np.float64)) - np.log(np.asarray(incumbent, dtype=np.float64))


def wilcoxon_p(differences: Sequence[float] | Floats) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test that the differences centre on zero.

    Exact for up to `EXACT_LIMIT` differences without ties, else the normal approximation with tie correction. Zero
    differences are dropped (Wilcoxon 1945); if none are left the result is 1.
    """
    from scipy.stats import wilcoxon

    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    ties = len(np.unique(np.abs(values))) < len(values)
    method = "asymptotic" if ties or len(values) > EXACT_LIMIT else "exact"
    return float(wilcoxon(values, method=method).pvalue)


def signed_rank_bounds(differences: Sequence[float] | Floats, confidence: float = 0.95) -> Interval | None:
    """The Hodges-Lehmann estimate of the centre of differences, with bounds from the exact signed-rank test.

    The estimate and bounds of Hodges and Lehmann (1963), from the means of all pairs. ``None`` for too few differences
    to reject anything: fewer than six at 95 %.
    """
    values = np.asarray(differences, dtype=np.float64)
    distribution = _signed_rank_distribution(len(values))
    rejected = int(np.searchsorted(distribution, (1 - confidence) / 2, side="right"))
    if not rejected:
        return None
    # of all pairs, each value with itself included
    means = np.sort(np.add.outer(values, values)[np.tri(len(values), dtype=bool)] / 2)
    middle = len(means) // 2
    return Interval(
        median=float(means[middle] + means[-1 - middle]) / 2,
        low=float(means[rejected - 1]),
        high=float(means[-rejected]),
    )


@cache
def _signed_rank_distribution(count: int) -> Floats:
    """P(W <= w) for every w: subsets of 1..count by their sum, counted by adding one rank at a time."""
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1
    for rank in range(1, count + 1):
        ways[rank:] = ways[rank:] + ways[: len(ways) - rank]
    return np.asarray(np.cumsum(ways) / 2.0**count, dtype=np.float64)


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: the multiple of a standard error that covers ``confidence``."""
    from scipy.special import stdtrit  # loads in a third of the time of scipy.stats

    return float(stdtrit(freedom, (1 + confidence) / 2))


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups, pooled over them, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return 0.0, 0
    squares = sum(float(((np.asarray(group) - np.mean(group)) ** 2).sum()) for group in groups)
    return math.sqrt(squares / freedom), freedom


def build_deviation(builds: Sequence[Sequence[float]] | Floats) -> float:
    """Standard deviation of logarithms between fresh builds of one model, with the variation between runs removed.

    Takes one sequence of samples for each of two or more builds; position ``i`` of every sequence belongs to the
    same round. The variance of the builds' levels contains both kinds of variation; the part from runs that averaging
    leaves is estimated from their variation about the build's level, and subtracted: analysis of variance with random
    effects (Eisenhart 1947). On a busy machine runs cause most of it.
    """
    logs = np.log(np.asarray(builds, dtype=np.float64))
    apart = logs - logs.mean(axis=0)
    among = float(np.std([trimmed_mean(build) for build in apart], ddof=1))
    # Each build contributes to the rounds' means, which reduces the deviation of its runs from them.
    by_runs = float(np.mean([trimmed_error(build) ** 2 for build in apart])) / (1 - 1 / len(apart))
    return math.sqrt(max(0.0, among**2 - by_runs))


# The standard deviation between builds of one model, the root mean square over 79 measurements of five builds each of
# 12 models, and the degrees of freedom that it counts for (docs/decisions/0038).
USUAL_BUILDS = 0.015, 2
ENOUGH_FREEDOM = 4  # of five builds, whose deviation is used as it is


def likely_build_deviation(deviation: float, freedom: int) -> float:
    """The standard deviation between builds: as measured, or of few builds combined with a usual one.

    The mean of both variances, weighted by degrees of freedom (Smyth 2004): three builds often agree by chance, and
    one disturbed build makes their deviation several times too large.
    """
    if freedom >= ENOUGH_FREEDOM:
        return deviation
    usual, others = USUAL_BUILDS
    return math.sqrt((freedom * deviation**2 + others * usual**2) / (freedom + others))


def time_deviation(series: Sequence[Sequence[Floats]]) -> tuple[float, int]:
    """Standard deviation of a log ratio between times, with run noise removed, and its degrees of freedom.

    Each series has the looks at one pair of builds, one after the other; a look is the log ratios of its
    rounds. Looks of a series have the same builds, so their differences, beyond the noise of their runs, are
    caused by the state of the machine.
    """
    several = [looks for looks in series if len(looks) > 1]
    among, freedom = pooled_deviation([[trimmed_mean(look) for look in looks] for looks in several])
    if not freedom:
        return 0.0, 0
    by_runs = float(np.mean([trimmed_error(look) ** 2 for looks in several for look in looks]))
    return math.sqrt(max(0.0, among**2 - by_runs)), freedom


def ratio_intervals(
    roles: Mapping[str, Sequence[Sequence[float]]],
    base: str,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every role's time over the base role's, with 95 % confidence intervals that include run noise and build noise.

    Each role holds one sequence of samples per fresh build; position ``i`` of every sequence belongs to the same round.
    Builds are the unit of replication: the deviation between builds of one role, pooled over the roles, already
    contains the run noise that averaging leaves. With a single build per role that deviation is unknown, and the
    interval is (0, infinity). Builds of several ``measurements`` have equal means in each round and equally many
    builds of each role in each measurement; every further measurement takes a degree of freedom (two-way analysis of
    variance).

    All samples are of one time. ``times`` is the result of `time_deviation` for several times; from
    `FEWEST_FREEDOM` on its variance is added. Below, Student's t is so large that no gain could be proved.
    """
    return _confident(build_levels(roles), base, measurements, times)


def _confident(
    levels: Mapping[str, Floats], base: str, measurements: int, times: tuple[float, int]
) -> dict[str, Interval]:
    """The ratios of levels with confidence intervals; see `ratio_intervals`."""
    builds = variance_of_builds(levels, measurements)
    extra = (times[0] ** 2, times[1]) if times[1] >= FEWEST_FREEDOM else (0.0, 0)

    def reach(role: str) -> float:
        share = 1 / len(levels[role]) + 1 / len(levels[base])
        return student_half_width((builds[0] * share, builds[1]), extra)

    return _ratios(levels, base, reach)


def _ratios(levels: Mapping[str, Floats], base: str, reach: Callable[[str], float]) -> dict[str, Interval]:
    """The ratio of each role's level to the base role's; ``reach`` is half the width of the interval in logarithms."""
    ratios = {}
    for role, own in levels.items():
        center = float(own.mean() - levels[base].mean())
        is_base = role == base
        ratios[role] = Interval(median=1, low=1, high=1) if is_base else ratio_around(center, reach(role))
    return ratios


def ratio_around(center: float, reach: float) -> Interval:
    """The ratio with the logarithm ``center``, and the bounds ``reach`` below and above that."""
    return Interval(median=center, low=center - reach, high=center + reach).exponential


def build_levels(roles: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Floats]:
    """The level of each fresh build, by role: the trimmed mean of its logarithms.

    Each round's mean over all builds is subtracted, which removes drift.
    """
    logs = {role: np.log(np.asarray(builds, dtype=np.float64)) for role, builds in roles.items()}
    rounds = np.concatenate(list(logs.values())).mean(axis=0)
    return {
        role: np.array([trimmed_mean(build - rounds) for build in builds]) for role, builds in logs.items()
    }


def variance_of_builds(levels: Mapping[str, Floats], measurements: int = 1) -> Variance:
    """The variance between builds of one role, pooled over the roles; see `ratio_intervals` for ``measurements``."""
    deviation, pooled = pooled_deviation([own.tolist() for own in levels.values()])
    freedom = max(0, pooled - (measurements - 1))
    return (deviation**2 * pooled / freedom if freedom else 0.0), freedom


def student_half_width(*parts: Variance) -> float:
    """Half the width of a 95 % interval for a value with the sum of these variances; infinite if the first is unknown.

    By Student's t, with the degrees of freedom of the sum (Satterthwaite 1946).
    """
    if not parts[0][1]:
        return math.inf
    known = [(variance, freedom) for variance, freedom in parts if variance]
    total = sum(variance for variance, _ in known)
    shares = sum(variance**2 / freedom for variance, freedom in known)
    freedom = max(1, math.floor(total**2 / shares + 1e-9)) if shares else parts[0][1]
    return student_t(0.95, freedom) * math.sqrt(total)


def enclosed_ratios(
    steady: Mapping[str, Sequence[Sequence[float]]],
    first: Mapping[str, Sequence[Sequence[float]]],
    base: str,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every role's time over the base role's, between two conditions of the caches.

    ``steady`` are times of consecutive runs, ``first`` those of the first run after another model ran, both in
    the format of `ratio_intervals`. The estimate is their geometric mean, and the interval encloses the
    intervals of both: a value outside it is excluded in both conditions. Without ``first`` it is that of
    ``steady``.
    """
    found = ratio_intervals(steady, base, measurements, times)
    if not first:
        return found
    cold = ratio_intervals(first, base, measurements, times)
    return {
        role: Interval(
            median=math.sqrt(found[role].median * cold[role].median),
            low=min(found[role].low, cold[role].low),
            high=max(found[role].high, cold[role].high),
        )
        for role in found
    }


def ratio_tests(
    steady: Mapping[str, Sequence[Sequence[float]]],
    first: Mapping[str, Sequence[Sequence[float]]],
    base: str,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, RatioTest]:
    """Every role's time over the base role's for tests of a gain. The arguments are those of `enclosed_ratios`.

    The interval of the mean is that of the means of each build's levels in both conditions.
    """
    enclosing = enclosed_ratios(steady, first, base, measurements, times)
    if not first:
        means = enclosing
    else:
        means = _confident(_middle_of([build_levels(steady), build_levels(first)]), base, measurements, times)
    return {role: RatioTest(mean=means[role], enclosing=enclosing[role]) for role in enclosing}


def _middle_of(conditions: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The mean of each build's levels over the conditions."""
    return {role: np.mean([levels[role] for levels in conditions], axis=0) for role in conditions[0]}


def drift(builds: Sequence[Sequence[float]]) -> float:
    """The slowdown of the last third of the rounds against the first, over all builds: 0.05 is five per cent.

    Position ``i`` of every sequence belongs to the same round. Ratios taken round by round are not affected by drift;
    times in milliseconds are.
    """
    rounds = np.log(np.asarray(builds, dtype=np.float64)).mean(axis=0)
    third = len(rounds) // 3
    if not third:
        return 0.0
    return float(np.exp(np.median(rounds[-third:]) - np.median(rounds[:third])) - 1)


# The standard deviation of a log ratio between times, and its degrees of freedom, before anything is known of a
# machine: fitted to 132 claims beside independent figures, on three machines (docs/decisions/0045).
USUAL_TIMES = 0.008, 6


def predicted_ratios(
    steady: Mapping[str, Sequence[Sequence[float]]],
    first: Mapping[str, Sequence[Sequence[float]]],
    base: str,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every role's time over the base role's, as another program measures it: the estimate and its prediction interval.

    The arguments are those of `enclosed_ratios`. The other program has as many builds as this measurement, at
    another time, in one of the two conditions of the caches. So the interval has the variance between builds of
    both measurements, twice that between times (`variance_between_times`), and on each side half of the
    difference between the conditions.
    """
    conditions = [build_levels(each) for each in (steady, first) if each]
    middle = _middle_of(conditions)
    theirs = float(np.mean([variance_of_builds(levels, measurements)[0] for levels in conditions]))
    ours, freedom = variance_of_builds(middle, measurements)
    between, looks = variance_between_times(times)

    def reach(role: str) -> float:
        share = 1 / len(middle[role]) + 1 / len(middle[base])
        half = student_half_width((share * (ours + theirs), freedom), (2 * between, looks))
        return half + (_spread(conditions[0], conditions[1], role, base, measurements) if first else 0.0)

    return _ratios(middle, base, reach)


def variance_between_times(times: tuple[float, int]) -> Variance:
    """The variance of a log ratio between times: the one that a search measured, combined with a usual value.

    If its looks vary more than `USUAL_TIMES`, their variance. If they vary less, the mean weighted by degrees
    of freedom (Smyth 2004): few looks that agree by chance do not prove a steady machine, and many do. The
    degrees of freedom add up, because the usual value is known before the first look.
    """
    (deviation, freedom), (usual, others) = times, USUAL_TIMES
    together = freedom + others
    if deviation > usual:
        return deviation**2, together
    return (freedom * deviation**2 + others * usual**2) / together, together


def _spread(
    steady: Mapping[str, Floats], first: Mapping[str, Floats], role: str, base: str, measurements: int
) -> float:
    """Half of the difference of the log ratio between the conditions, reduced by the expected effect of noise."""
    halves = {name: (first[name] - steady[name]) / 2 for name in steady}
    variance = variance_of_builds(halves, measurements)[0] * (1 / len(halves[role]) + 1 / len(halves[base]))
    difference = float(halves[role].mean() - halves[base].mean())
    return math.sqrt(max(0.0, difference**2 - variance))
