"""Statistics of timings: tests of pairs, ratios of fresh builds, and changes between two runs. Pure.

scipy takes up to a second to import, so the functions that call it import it (docs/decisions/0005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from statistics import NormalDist
from threading import Thread
from typing import NamedTuple, TypeAlias

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.types import Interval, LatencyEvidence, RatioTest, TimeChange

Deviation: TypeAlias = tuple[float, int]  # a standard deviation of logarithms, with its degrees of freedom
Variance: TypeAlias = tuple[float, float]  # a variance of logarithms, with its degrees of freedom


def preload_scipy() -> None:
    """Import scipy in the background, for a caller that will need its tests and waits for engines first."""
    Thread(target=import_module, args=("scipy.stats",), name="qdqspec-import").start()


def trimmed_mean(values: Sequence[float] | Floats, share: float = 0.2) -> float:
    """The trimmed mean: without the lowest and highest ``share`` of the values (each side)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(len(ordered) * share)
    return float(ordered[cut : len(ordered) - cut].mean())


def trimmed_error(values: Sequence[float] | Floats, share: float = 0.2) -> float:
    """Standard error of `trimmed_mean` of two or more values, winsorized (Tukey and McLaughlin 1963)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(len(ordered) * share)
    moved = np.clip(ordered, ordered[cut], ordered[len(ordered) - cut - 1])
    return float(moved.std(ddof=1)) / ((1 - 2 * cut / len(ordered)) * math.sqrt(len(ordered)))


def log_ratios(challenger: Sequence[float], incumbent: Sequence[float]) -> Floats:
    """Natural logarithms of the pairwise time ratios."""
    return np.log(np.asarray(challenger, dtype=np.float64)) - np.log(np.asarray(incumbent, dtype=np.float64))


def wilcoxon_p(differences: Sequence[float] | Floats) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test that the differences centre on zero; zeros are dropped."""
    from scipy.stats import wilcoxon

    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    return float(wilcoxon(values).pvalue) if len(values) else 1.0


def signed_rank_bounds(differences: Sequence[float] | Floats, confidence: float = 0.95) -> Interval | None:
    """The Hodges-Lehmann (1963) estimate of the centre of differences, with bounds from the exact signed-rank test.

    ``None`` for too few differences to reject anything: fewer than six at 95 %.
    """
    values = np.asarray(differences, dtype=np.float64)
    distribution = _signed_rank_distribution(len(values))
    rejected = int(np.searchsorted(distribution, (1 - confidence) / 2, side="right"))
    if not rejected:
        return None
    # of all pairs, each value with itself included
    means = np.sort(np.add.outer(values, values)[np.tri(len(values), dtype=bool)] / 2)
    return Interval(
        median=float(np.median(means)), low=float(means[rejected - 1]), high=float(means[-rejected])
    )


@cache
def _signed_rank_distribution(count: int) -> Floats:
    """P(W <= w) for every w: subsets of 1..count by their sum, counted by adding one rank at a time."""
    ways = np.ones(1)
    for rank in range(1, count + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    return np.asarray(np.cumsum(ways) / 2.0**count, dtype=np.float64)


def pooled_deviation(groups: Sequence[Sequence[float] | Floats]) -> Deviation:
    """Standard deviation within groups, pooled over them, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return 0.0, 0
    return math.sqrt(sum(len(group) * float(np.var(group)) for group in groups) / freedom), freedom


def build_deviation(
    builds: Sequence[Sequence[float]] | Floats, *, usual: Deviation = (0.015, 2), enough_freedom: int = 4
) -> float:
    """Standard deviation of logarithms between fresh builds of one model, with the variation between runs removed.

    Takes one sequence of samples for each of two or more builds; position ``i`` of every sequence belongs to the same
    round. The part from runs that averaging leaves is estimated from their variation about each build's level, and
    subtracted (Eisenhart 1947). Fewer builds than give ``enough_freedom`` often agree by chance: their variance is
    combined with the ``usual`` one (Smyth 2004), the root mean square over 79 measurements of five builds each of 12
    models, and the degrees of freedom that it counts for (docs/decisions/0007). More of either makes few builds count
    less.
    """
    logs = np.log(np.asarray(builds, dtype=np.float64))
    apart = logs - logs.mean(axis=0)
    # Each build contributes to the rounds' means, which reduces the deviation of its runs from them.
    deviation, freedom = _deviation_without_runs([list(apart)], 1 / (1 - 1 / len(apart)))
    if freedom >= enough_freedom:
        return deviation
    return math.sqrt(_with_usual((deviation, freedom), usual)[0])


def time_deviation(series: Sequence[Sequence[Floats]]) -> Deviation:
    """Standard deviation of a log ratio between times, with run noise removed, and its degrees of freedom.

    Each series has the looks at one pair of builds, one after the other; a look is the log ratios of its rounds. Looks
    of one series differ, beyond the noise of their runs, by the state of the machine.
    """
    return _deviation_without_runs([looks for looks in series if len(looks) > 1])


def _deviation_without_runs(groups: Sequence[Sequence[Floats]], correction: float = 1.0) -> Deviation:
    """The deviation between the levels of a group's members, less the part that is caused by runs."""
    among, freedom = pooled_deviation([[trimmed_mean(runs) for runs in group] for group in groups])
    if not freedom:
        return 0.0, 0
    by_runs = float(np.mean([trimmed_error(runs) ** 2 for group in groups for runs in group])) * correction
    return math.sqrt(max(0.0, among**2 - by_runs)), freedom


def _with_usual(measured: Deviation, usual: Deviation) -> Variance:
    """The mean of a measured and a usual variance, weighted by degrees of freedom (Smyth 2004)."""
    freedom = measured[1] + usual[1]
    return (measured[1] * measured[0] ** 2 + usual[1] * usual[0] ** 2) / freedom, freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """The time of a model over that of another one, estimated from fresh builds of both.

    ``test`` says whether this measurement proves a gain. ``predicted`` is the 95 % prediction interval: the ratio that
    another program measures, with other builds, at another time (docs/decisions/0006).
    """

    test: RatioTest
    predicted: Interval


def estimate_ratios(
    conditions: Sequence[Mapping[str, Sequence[Sequence[float]]]],
    base: str,
    measurements: int = 1,
    times: Deviation = (0.0, 0),
    *,
    usual_times: Deviation = (0.008, 6),
    fewest_freedom: int = 3,
) -> dict[str, RatioEstimate]:
    """Every role's time over the base role's, from one or two conditions of the caches.

    The conditions are consecutive runs, and first runs after another model. Each has one sequence of samples per fresh
    build, by role; position ``i`` of every sequence belongs to the same round. The estimate is the mean over the
    conditions, in logarithms, as all that follows.

    Builds are the unit of replication: the deviation between the levels of one role's builds, pooled over the roles.
    With a single build per role it is unknown, and intervals are (0, infinity). Each further one of several
    ``measurements`` takes a degree of freedom, as their builds have equal means in each round. ``times`` is the result
    of `time_deviation`.

    - Confidence intervals have the variance between builds, and with ``fewest_freedom`` degrees of freedom that between
      times: fewer are often wrong by chance.
    - The prediction interval is for another program that has as many builds, at another time, in one of the conditions:
      the variance between builds of both programs, twice that between times, and half of the difference between the
      conditions. The variance between times is combined with ``usual_times``, fitted to 132 claims beside independent
      figures on three machines (docs/decisions/0006): a larger one gives wider intervals.
    """
    levels = [build_levels(each) for each in conditions]
    middle = {role: np.mean([each[role] for each in levels], axis=0) for role in levels[0]}
    between_builds = [variance_of_builds(each, measurements) for each in (middle, *levels)]
    for_tests = times[0] ** 2 / measurements if times[1] >= fewest_freedom else 0.0, times[1]
    usual, time_freedom = _with_usual(times, usual_times)
    time_variance = max(usual, times[0] ** 2)  # few looks that agree by chance do not prove a steady machine
    found = {}
    for role in middle:
        if role == base:
            one = Interval(median=1, low=1, high=1)
            found[role] = RatioEstimate(test=RatioTest(mean=one, enclosing=one), predicted=one)
            continue
        share = 1 / len(middle[role]) + 1 / len(middle[base])
        mean, *apart = (
            ratio_around(
                float(each[role].mean() - each[base].mean()),
                student_half_width((share * variance, freedom), for_tests),
            )
            for each, (variance, freedom) in zip((middle, *levels), between_builds, strict=True)
        )
        enclosing = Interval(
            median=mean.median, low=min(each.low for each in apart), high=max(each.high for each in apart)
        )
        both = between_builds[0][0] + float(np.mean([variance for variance, _ in between_builds[1:]]))
        reach = student_half_width((share * both, between_builds[0][1]), (2 * time_variance, time_freedom))
        reach += _half_apart(levels, role, base, measurements)
        predicted = ratio_around(math.log(mean.median), reach)
        found[role] = RatioEstimate(test=RatioTest(mean=mean, enclosing=enclosing), predicted=predicted)
    return found


def build_levels(roles: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Floats]:
    """The level of each fresh build, by role: the trimmed mean of its logarithms, less the mean of each round."""
    logs = {role: np.log(np.asarray(builds, dtype=np.float64)) for role, builds in roles.items()}
    rounds = np.concatenate(list(logs.values())).mean(axis=0)
    return {
        role: np.array([trimmed_mean(build - rounds) for build in builds]) for role, builds in logs.items()
    }


def variance_of_builds(levels: Mapping[str, Floats], measurements: int = 1) -> Variance:
    """The variance between builds of one role, pooled over the roles; see `estimate_ratios` for ``measurements``."""
    deviation, pooled = pooled_deviation(list(levels.values()))
    freedom = max(0, pooled - (measurements - 1))
    return (deviation**2 * pooled / freedom if freedom else 0.0), freedom


def ratio_around(center: float, reach: float) -> Interval:
    """The ratio with the logarithm ``center``, and the bounds ``reach`` below and above that."""
    return Interval(median=center, low=center - reach, high=center + reach).exponential


def student_half_width(*parts: Variance) -> float:
    """Half the width of a 95 % interval for a value with the sum of these variances; infinite if the first is unknown.

    By Student's t, with the degrees of freedom of the sum (Satterthwaite 1946).
    """
    if not parts[0][1]:
        return math.inf
    from scipy.special import stdtrit  # loads in a third of the time of scipy.stats

    known = [(variance, freedom) for variance, freedom in parts if variance]
    total = sum(variance for variance, _ in known)
    shares = sum(variance**2 / freedom for variance, freedom in known)
    freedom = max(1, math.floor(total**2 / shares + 1e-9)) if shares else parts[0][1]
    return float(stdtrit(freedom, 0.975)) * math.sqrt(total)


def _half_apart(levels: Sequence[Mapping[str, Floats]], role: str, base: str, measurements: int) -> float:
    """Half of the difference of the log ratio between two conditions, reduced by the expected effect of noise."""
    if len(levels) == 1:
        return 0.0
    steady, first = levels
    halves = {name: (first[name] - steady[name]) / 2 for name in steady}
    variance = variance_of_builds(halves, measurements)[0] * (1 / len(halves[role]) + 1 / len(halves[base]))
    difference = float(halves[role].mean() - halves[base].mean())
    return math.sqrt(max(0.0, difference**2 - variance))


def drift(builds: Sequence[Sequence[float]]) -> float:
    """The slowdown of the last third of the rounds against the first, over all builds: 0.05 is five per cent.

    Position ``i`` of every sequence belongs to the same round. Ratios taken round by round are not affected by it.
    """
    rounds = np.log(np.asarray(builds, dtype=np.float64)).mean(axis=0)
    third = len(rounds) // 3
    if not third:
        return 0.0
    return float(np.exp(np.median(rounds[-third:]) - np.median(rounds[:third])) - 1)


# ---- changes between two runs -------------------------------------------------------------------

# Builds of one model differ by one or two per cent, so that a thousand runs of one build prove nothing, and the mean of
# few builds is moved by one outlier: Welch's test over builds, and a rank test over rounds.

Builds: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTimes:
    """Milliseconds of one run on one clock: a sequence for each fresh build, all of one length.

    With a ``reference`` the ratio tuned / reference is compared, and position ``i`` of every sequence belongs to one
    round; without one, the times themselves, run by run. ``beside`` are other models of the run, used only to estimate
    the variation between builds.
    """

    tuned: Builds
    reference: Builds = ()
    beside: tuple[Builds, ...] = ()

    @classmethod
    def of(cls, latency: LatencyEvidence) -> BuildTimes:
        """The samples of tuned and reference by build, between both conditions of the caches."""
        tuned, reference = (
            builds_of(latency.samples[role].between(latency.clock), latency.builds)
            for role in ("tuned", "reference")
        )
        return cls(tuned=tuned, reference=reference)

    @property
    def alone(self) -> bool:
        """Whether the reference itself is the selected model: the ratio is exactly one."""
        return self.tuned == self.reference

    @property
    def interval(self) -> Interval:
        """The ratio tuned / reference (without a reference: the time) with its 95 % interval."""
        level = _level(self)
        return ratio_around(level.center, student_half_width(level.variance))

    def change_from(self, before: BuildTimes) -> TimeChange:
        """The change of the ratio (without references: of the time), now over before.

        The interval is Welch's (1947). The rank test is that of Mann and Whitney (1947) on the logarithms of each
        round, its bounds those of Hodges and Lehmann (1963).
        """
        from scipy.stats import mannwhitneyu

        ours, theirs = _level(self), _level(before)
        references = [times.reference for times in (self, before) if times.reference]
        middles = [float(np.median(np.concatenate(builds))) for builds in references]
        return TimeChange(
            builds=ratio_around(
                ours.center - theirs.center, student_half_width(ours.variance, theirs.variance)
            ),
            ranks=shift_bounds(ours.rounds, theirs.rounds).exponential,
            p_value=float(mannwhitneyu(ours.rounds, theirs.rounds, method="asymptotic").pvalue),
            reference=middles[0] / middles[1] if len(middles) == 2 else 1.0,
        )


def builds_of(values: tuple[float, ...], builds: int) -> Builds:
    """Split the times of joined samples by build; one build if they do not divide evenly."""
    count = builds if builds > 0 and len(values) % builds == 0 else 1
    length = len(values) // count
    return tuple(values[start : start + length] for start in range(0, len(values), max(1, length)))


def shift_bounds(
    ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats, alpha: float = 0.01
) -> Interval:
    """The shift between two samples: the median of all differences, and the bounds that the rank test does not reject.

    ``alpha`` is the error on each side: a larger one finds smaller changes, and more that are none. Samples too small
    to reject anything have infinite bounds.
    """
    differences = np.sort(np.subtract.outer(np.asarray(ours), np.asarray(theirs)), axis=None)
    pairs = len(differences)
    deviation = math.sqrt(pairs * (len(ours) + len(theirs) + 1) / 12)
    needed = math.ceil(pairs / 2 + 0.5 + NormalDist().inv_cdf(1 - alpha) * deviation)
    known = needed <= pairs
    return Interval(
        median=float(np.median(differences)),
        low=float(differences[pairs - needed]) if known else -math.inf,
        high=float(differences[needed - 1]) if known else math.inf,
    )


class _Level(NamedTuple):
    """One run in logarithms: its value, the variance of that, and the values to rank."""

    center: float
    variance: Variance
    rounds: Floats


def _level(times: BuildTimes, unknown_deviation: float = 0.024) -> _Level:
    """The level of a run.

    With one build for each role, ``unknown_deviation`` is assumed between builds, the largest that was measured: less
    finds smaller changes, and more that are none.
    """
    logs = [np.log(np.asarray(builds, np.float64)) for builds in (times.tuned, times.reference) if builds]
    if times.alone:
        return _Level(0.0, (0.0, math.inf), np.zeros(logs[0].shape[1]))
    if times.reference:
        rounds = np.concatenate(logs).mean(axis=0)
        logs = [group - rounds for group in logs]
    levels = [[trimmed_mean(build) for build in group] for group in logs]
    beside = [[trimmed_mean(np.log(build)) for build in builds] for builds in times.beside]
    deviation, freedom = pooled_deviation([*levels, *beside])
    if not freedom:
        deviation = unknown_deviation
    variance = deviation**2 * sum(1 / len(group) for group in levels)
    ranked = logs[0].mean(axis=0) - logs[1].mean(axis=0) if times.reference else logs[0].ravel()
    center = float(np.mean(levels[0])) - (float(np.mean(levels[1])) if times.reference else 0.0)
    return _Level(center, (variance, freedom or math.inf), ranked)
