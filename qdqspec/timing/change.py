"""Changes of the times of fresh builds between two runs. Pure.

Times are compared by Welch's test over builds and a rank test over rounds: builds of one model differ by one or two per
cent, so that a thousand runs of one build prove nothing, and the mean of few builds is moved by one outlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.timing.stats import Variance, pooled_deviation, ratio_around, student_half_width, trimmed_mean
from qdqspec.types import Clock, Interval, LatencyEvidence, Samples, TimeChange

UNKNOWN_DEVIATION = 0.024  # between builds, assumed with one build per role: the largest we have measured

Builds = tuple[tuple[float, ...], ...]


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

    @property
    def alone(self) -> bool:
        """Whether the reference itself is the selected model: the ratio is exactly one."""
        return self.tuned == self.reference


def ratio_times(latency: LatencyEvidence, *, in_a_row: bool = False) -> BuildTimes:
    """The samples of tuned and reference by build: between both conditions of the caches, or only of runs in a row."""
    clock, builds = latency.clock, latency.builds
    samples = [latency.samples[role] for role in ("tuned", "reference")]
    tuned, reference = (
        _apart(each.on(clock) if in_a_row else each.between(clock), builds) for each in samples
    )
    return BuildTimes(tuned=tuned, reference=reference)


def builds_of(samples: Samples, clock: Clock, builds: int) -> Builds:
    """Split joined samples by build."""
    return _apart(samples.on(clock), builds)


def _apart(values: tuple[float, ...], builds: int) -> Builds:
    """One build if they do not divide evenly."""
    count = builds if builds > 0 and len(values) % builds == 0 else 1
    length = len(values) // count
    return tuple(values[start : start + length] for start in range(0, len(values), max(1, length)))


def ratio_interval(times: BuildTimes) -> Interval:
    """The ratio tuned / reference (without a reference: the time) with its 95 % interval."""
    level = _level(times)
    return ratio_around(level.center, student_half_width(level.variance))


def change_between(now: BuildTimes, before: BuildTimes) -> TimeChange:
    """The change of the ratio (without references: of the time), now over before.

    The interval is Welch's (1947). The rank test is that of Mann and Whitney (1947) on the logarithms of each round,
    its bounds those of Hodges and Lehmann (1963).
    """
    from scipy.stats import mannwhitneyu

    ours, theirs = _level(now), _level(before)
    references = [times.reference for times in (now, before) if times.reference]
    middles = [float(np.median(np.concatenate(builds))) for builds in references]
    return TimeChange(
        builds=ratio_around(ours.center - theirs.center, student_half_width(ours.variance, theirs.variance)),
        ranks=shift_bounds(ours.rounds, theirs.rounds).exponential,
        p_value=float(mannwhitneyu(ours.rounds, theirs.rounds, method="asymptotic").pvalue),
        reference=middles[0] / middles[1] if len(middles) == 2 else 1.0,
    )


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


def _level(times: BuildTimes) -> _Level:
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
        deviation = UNKNOWN_DEVIATION
    variance = deviation**2 * sum(1 / len(group) for group in levels)
    ranked = logs[0].mean(axis=0) - logs[1].mean(axis=0) if times.reference else logs[0].ravel()
    center = float(np.mean(levels[0])) - (float(np.mean(levels[1])) if times.reference else 0.0)
    return _Level(center, (variance, freedom or math.inf), ranked)
