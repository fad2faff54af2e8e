"""Changes between two runs: of the times of fresh builds, and of kernels under two versions of a runtime. Pure.

Times are compared by Welch's test and a rank test. Both tests are needed, because each misses effects that the other
detects. Builds of one model differ by one or two per cent, so the interval counts builds: a thousand runs of one
unlucky build prove nothing. The mean of few builds is moved by one outlier, so the rank test counts rounds, where an
outlier is one rank like others.

Kernels are compared by the nodes that they compute: those that share a node, directly or through another kernel of
either side, form a group. A group whose kernels divide its nodes otherwise has another fusion.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.graph.unify import joined
from qdqspec.measurement.stats import pooled_deviation, ratio_around, student_t, trimmed_mean
from qdqspec.types import Clock, Interval, LatencyEvidence, LayerChange, LayerTime, Samples, TimeChange

RANK_ALPHA = 0.01  # one-sided
UNKNOWN_DEVIATION = 0.024  # between builds, assumed with one build per role: the largest we have measured
_ENOUGH = 200  # degrees of freedom from which Student's t equals the normal distribution to two digits

Builds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTimes:
    """Milliseconds of one run on one clock: a sequence for each fresh build, all of one length.

    With a ``reference`` the ratio tuned / reference is compared, and position ``i`` of every sequence belongs to one
    round, so that drift cancels; without one, the times themselves are compared, run by run. ``beside`` are other
    models of the run, used only to estimate the variation between builds.
    """

    tuned: Builds
    reference: Builds = ()
    beside: tuple[Builds, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether the reference itself is the selected model: the ratio is exactly one."""
        return self.tuned == self.reference


def ratio_times(latency: LatencyEvidence, *, in_a_row: bool = False) -> BuildTimes:
    """The samples of tuned and reference on the deciding clock, by build.

    They are between both conditions of the caches, like a speed-up; with ``in_a_row`` those of consecutive runs only.
    """
    clock, builds = latency.clock, latency.builds
    samples = [latency.samples[role] for role in ("tuned", "reference")]
    tuned, reference = (
        _apart(each.on(clock) if in_a_row else each.between(clock), builds) for each in samples
    )
    return BuildTimes(tuned=tuned, reference=reference)


def builds_of(samples: Samples, clock: Clock, builds: int) -> Builds:
    """Split joined samples by build; one build if they do not divide evenly."""
    return _apart(samples.on(clock), builds)


def _apart(values: tuple[float, ...], builds: int) -> Builds:
    count = builds if builds > 0 and len(values) % builds == 0 else 1
    length = len(values) // count
    return tuple(values[start : start + length] for start in range(0, len(values), max(1, length)))


def ratio_interval(times: BuildTimes) -> Interval:
    """The ratio tuned / reference (without a reference: the time) with its 95 % interval."""
    level = _level(times)
    return _interval(level.center, level.variance, level.freedom)


def change_between(now: BuildTimes, before: BuildTimes) -> TimeChange:
    """The change of the ratio (without references: of the time), now over before.

    The interval is Welch's (1947): each run has its own variance between builds. The rank test is that of Mann and
    Whitney (1947) on the logarithms of each round, its bounds those of Hodges and Lehmann (1963).
    """
    ours, theirs = _level(now), _level(before)
    variance = ours.variance + theirs.variance
    # Degrees of freedom of the sum of two variances (Welch and Satterthwaite).
    parts = sum(level.variance**2 / level.freedom for level in (ours, theirs))
    freedom = (ours.variance + theirs.variance) ** 2 / parts if parts else math.inf
    references = [times.reference for times in (now, before) if times.reference]
    middles = [float(np.median(np.concatenate(builds))) for builds in references]
    return TimeChange(
        builds=_interval(ours.center - theirs.center, variance, freedom),
        ranks=shift_bounds(ours.rounds, theirs.rounds).exponential,
        p_value=mann_whitney_p(ours.rounds, theirs.rounds),
        reference=middles[0] / middles[1] if len(middles) == 2 else 1.0,
    )


def mann_whitney_p(ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats) -> float:
    """Two-sided p-value of the Mann-Whitney rank test.

    Normal approximation with corrections for ties and continuity.
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(ours, theirs, method="asymptotic").pvalue)


def shift_bounds(ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats) -> Interval:
    """The shift between two samples: the median of all differences, and the bounds that the rank test does not reject.

    A shift outside the bounds is rejected, with error `RANK_ALPHA` on each side. Samples too small to reject anything
    have infinite bounds.
    """
    differences = np.sort(np.subtract.outer(np.asarray(ours), np.asarray(theirs)), axis=None)
    pairs = len(differences)
    deviation = math.sqrt(pairs * (len(ours) + len(theirs) + 1) / 12)
    needed = math.ceil(pairs / 2 + 0.5 + NormalDist().inv_cdf(1 - RANK_ALPHA) * deviation)
    known = needed <= pairs
    return Interval(
        median=float(np.median(differences)),
        low=float(differences[pairs - needed]) if known else -math.inf,
        high=float(differences[needed - 1]) if known else math.inf,
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """One run in logarithms: its value, the variance and degrees of freedom of that, and the values to rank."""

    center: float
    variance: float
    freedom: float
    rounds: Floats


def _level(times: BuildTimes) -> _Level:
    logs = [
        np.log(np.asarray(builds, dtype=np.float64)) for builds in (times.tuned, times.reference) if builds
    ]
    if times.alone:
        return _Level(0.0, 0.0, math.inf, np.zeros(logs[0].shape[1]))
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
    return _Level(center, variance, freedom or math.inf, ranked)


def _interval(center: float, variance: float, freedom: float) -> Interval:
    reach = student_t(0.95, int(min(freedom, _ENOUGH))) * math.sqrt(variance) if variance else 0.0
    return ratio_around(center, reach)


MOST_CHANGE = 0.25  # of a group's time, which profiles of short kernels vary by
LEAST_SHARE = 0.02  # of the model's time, below which a change of time is not listed

Layers = Sequence[LayerTime]
_Key = tuple[str, str]  # "node" or "tensor", and its name


def median_layers(profiles: Sequence[Layers]) -> tuple[LayerTime, ...]:
    """The kernels of several profiles of one engine, each with its median time."""
    first, *rest = profiles
    names = [layer.name for layer in first]
    alike = [p for p in rest if [layer.name for layer in p] == names]
    columns = zip(first, *alike, strict=True)
    return tuple(
        replace(column[0], milliseconds=statistics.median(layer.milliseconds for layer in column))
        for column in columns
    )


def steady_changes(before: Sequence[Layers], after: Sequence[Layers]) -> tuple[LayerChange, ...]:
    """The changes between the first builds of both sides, without changes of time that other builds do not confirm.

    Kernels of fresh builds of one model vary in time. A change of time counts if every further pair of builds has one
    of the same sign.
    """
    first, *rest = [layer_changes(old, new) for old, new in zip(before, after, strict=True)]
    moved = [{change.nodes + change.tensors: _sign(change) for change in each} for each in rest]
    found = []
    for change in first:
        key = change.nodes + change.tensors
        if "time" in change.kinds and not all(each.get(key) == _sign(change) for each in moved):
            change = replace(change, kinds=tuple(kind for kind in change.kinds if kind != "time"))
        if change.kinds:
            found.append(change)
    return tuple(found)


def _sign(change: LayerChange) -> float:
    """1 if it became slower, -1 if faster, 0 if the change of time is not significant."""
    return math.copysign(1.0, change.after_ms - change.before_ms) if "time" in change.kinds else 0.0


def layer_changes(before: Layers, after: Layers) -> tuple[LayerChange, ...]:
    """The groups of kernels that differ in fusion, precision or time; the largest change of time first."""
    whole = math.fsum(layer.milliseconds for layer in before) or 1.0
    changes = (_change(old, new, whole) for old, new in kernel_groups(before, after, _keys))
    return tuple(sorted(filter(None, changes), key=lambda c: -abs(c.after_ms - c.before_ms)))


def kernel_groups(
    before: Layers, after: Layers, keys: Callable[[LayerTime], Sequence[Hashable]]
) -> list[tuple[list[LayerTime], list[LayerTime]]]:
    """Kernels of both sides that share keys, directly or through others, in the order of the model."""
    alike = [keys(layer) for layer in (*before, *after)]
    classes = joined(dict.fromkeys(key for each in alike for key in each), alike)
    home = {key: number for number, keys_of in enumerate(classes) for key in keys_of}
    groups: dict[int, tuple[list[LayerTime], list[LayerTime]]] = {}
    for side, layers in enumerate((before, after)):
        for layer in layers:
            groups.setdefault(home[keys(layer)[0]], ([], []))[side].append(layer)
    return list(groups.values())


def _keys(layer: LayerTime) -> list[_Key]:
    if layer.nodes:
        return [("node", node) for node in layer.nodes]
    return [("tensor", tensor) for tensor in layer.tensors] or [("tensor", layer.name)]


def _change(old: list[LayerTime], new: list[LayerTime], whole: float) -> LayerChange | None:
    before_ms, after_ms = (math.fsum(layer.milliseconds for layer in side) for side in (old, new))
    kinds = []
    if _fusion(old) != _fusion(new):
        kinds.append("fusion")
    if _precision(old) != _precision(new):
        kinds.append("precision")
    moved = abs(after_ms - before_ms)
    if moved > LEAST_SHARE * whole and moved > MOST_CHANGE * before_ms:
        kinds.append("time")
    if not kinds:
        return None
    every = (*old, *new)
    return LayerChange(
        nodes=tuple(dict.fromkeys(node for layer in every for node in layer.nodes)),
        tensors=tuple(dict.fromkeys(t for layer in every if not layer.nodes for t in layer.tensors)),
        kinds=tuple(kinds),  # type: ignore[arg-type]  # a list of literals widens to text
        before=tuple(map(_text, old)),
        after=tuple(map(_text, new)),
        before_ms=before_ms,
        after_ms=after_ms,
    )


def _fusion(layers: list[LayerTime]) -> Counter[frozenset[_Key]]:
    return Counter(frozenset(_keys(layer)) for layer in layers)


def _precision(layers: list[LayerTime]) -> dict[_Key, tuple[bool, str]]:
    """Whether each node is computed in integers, and the precision that the runtime reports."""
    return {key: (layer.integer, layer.precision) for layer in layers for key in _keys(layer) if layer.nodes}


def _text(layer: LayerTime) -> str:
    """``QLinearConv (conv1, relu1), integer``."""
    named = ", ".join(layer.nodes or layer.tensors)
    precision = layer.precision or ("integer" if layer.integer else "")
    return f"{layer.op_type}{f' ({named})' if named else ''}{f', {precision}' if precision else ''}"
