"""Races: sequential Wilcoxon signed-rank tests on interleaved runs of two open engines.

Two builds timed one after the other are ranked wrongly in up to 83 % of cases on a shared machine; the same runs
interleaved and ranked, in a few per cent. So a challenger is timed in pairs with the incumbent, in random order inside
each pair, and accepted at the end of a round, the rounds growing, as soon as the rank test allows. It is also rejected
between rounds: as soon as the same test excludes a significant gain. Stopping early can miss a gain, but never claims a
false one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.backends.base import Engine
from qdqspec.measurement.stats import log_ratios, signed_rank_bounds, wilcoxon_p
from qdqspec.types import Clock, Interval, LayerTime, Race, Samples

LOOKS = (6, 12, 24, 48)  # numbers of pairs after which the test is evaluated
ALPHA = 0.02  # for each evaluation, one-sided: six pairs of one sign are the first that can decide
FUTILE = 0.85  # confidence of the interval that excludes a significant gain, which ends a race
FAR_SLOWER = 1.15  # a ratio above this after the first pairs ends the race
FAR_SLOWER_AFTER = 3
# largest number of runs before a fresh engine is timed; integer kernels are warm after five or six
WARMUP = 5
SCREEN = 3  # timed runs of a fresh engine
SETTLED = 0.02  # relative gain of a run over all before it, below which a fresh engine counts as warm
WARM_MS, TIMED_MS = 6.0, 3.0  # duration of the two parts of a turn, for models that are faster than that
MOST_RUNS = 5  # in either part
COLD_MS = 100.0  # of a run this long, the 0.4 to 3 ms by which a first one is longer are a small part
PROFILE_MS = 24.0  # total duration of the runs of a profile, ...
FEWEST_PROFILED, MOST_PROFILED = 5, 12  # ... within these numbers of runs
# wall time over CPU time of a turn above which another process disturbed it, and it is repeated
DISTURBED = 1.2
RETAKES = 2
MIXED_LAUNCHES = (
    "compared with one engine as a CUDA graph and the other without: the ratio holds the time of launches"
)
LONG_MS = 20.0  # a longer run is disturbed in any case, also when repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A warm engine in a race, with the digest of its placement."""

    digest: str
    engine: Engine
    graph_hash: str = ""


def race(
    challenger: Entrant,
    incumbent: Entrant,
    *,
    clock: Clock,
    eps: float,
    random: np.random.Generator,
) -> tuple[Race, Samples, Samples]:
    """Test whether the challenger takes less than ``1 - eps`` times the incumbent's time.

    Returns the verdict and the samples of challenger and incumbent. Engines with the same optimized graph run the same
    kernels: they are not raced.
    """
    if challenger.graph_hash and challenger.graph_hash == incumbent.graph_hash:
        same = Race(opponent=incumbent.digest, ratio=1.0, p_value=1.0, pairs=0, verdict="same graph")
        return same, Samples(), Samples()
    turn = Turn.lasting(max(e.time(1).median_ms(clock) for e in (challenger.engine, incumbent.engine)))
    ours, theirs = Samples(), Samples()
    for look in LOOKS:
        while len(theirs.wall_ms) < look:
            first_ours, first_theirs = _pair(
                turn, challenger.engine, incumbent.engine, bool(random.integers(2))
            )
            ours, theirs = ours + first_ours, theirs + first_theirs
            if len(theirs.wall_ms) == FAR_SLOWER_AFTER and _ratio(ours, theirs, clock) > FAR_SLOWER:
                return decided(incumbent.digest, ours, theirs, clock, eps), *_noted(ours, theirs)
            if _is_futile(ours, theirs, clock, eps):
                break
        outcome = decided(incumbent.digest, ours, theirs, clock, eps)
        if outcome.verdict != "no difference" or len(theirs.wall_ms) < look:
            break
    return outcome, *_noted(ours, theirs)


def _noted(ours: Samples, theirs: Samples) -> tuple[Samples, Samples]:
    """Both samples, with a note if only one of the engines ran as a CUDA graph."""
    if ours.launched_singly == theirs.launched_singly:
        return ours, theirs
    mine, other = (replace(each, notes=(*each.notes, MIXED_LAUNCHES)) for each in (ours, theirs))
    return mine, other


def both_of(first: Race, second: Race, ours: Samples, theirs: Samples, clock: Clock) -> Race:
    """Combine two races between different builds of the same two placements; won only if both were.

    ``ours`` and ``theirs`` are the samples of both.
    """
    return Race(
        opponent=first.opponent,
        ratio=math.sqrt(first.ratio * second.ratio),
        p_value=max(first.p_value, second.p_value),
        pairs=first.pairs + second.pairs,
        verdict="faster" if first.verdict == second.verdict == "faster" else "no difference",
        interval=_interval(log_ratios(ours.on(clock), theirs.on(clock))),
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """The procedure of one sample of an engine: untimed runs, then the median of timed ones.

    Another engine ran just before and left the caches cold: a first run takes 2 to 60 % longer, and a model of a
    millisecond, float more than integers, is warm after five or six. A model of 12 ms or more is warm after one; its
    first run takes 0.4 to 3 ms longer, with integers sometimes more than in float. Timed runs of a turn vary less than
    turns do, so that a few give as much information as many.
    """

    warmup: int
    runs: int

    @classmethod
    def lasting(cls, typical_ms: float) -> Turn:
        """A turn for an engine with this time per run."""
        warmup, runs = (min(MOST_RUNS, round(lasts / max(typical_ms, 1e-6))) for lasts in (WARM_MS, TIMED_MS))
        return cls(warmup=max(warmup, int(typical_ms < COLD_MS)), runs=max(1, runs))

    def sample(self, engine: Engine) -> Samples:
        """Take one sample; repeat it if another process disturbed it."""
        return self._undisturbed(median_sample(engine.time(self.runs, warmup=self.warmup)), engine)

    def both(self, engine: Engine) -> Samples:
        """The sample of a turn, with its first run, which follows a run of another model."""
        warmup = max(1, self.warmup)
        taken = time_after_another(engine, warmup + self.runs, self.warmup)
        steady = median_sample(_part(taken, slice(warmup, None)))
        return _with_first(self._undisturbed(steady, engine), _part(taken, slice(1)))

    def _undisturbed(self, sample: Samples, engine: Engine) -> Samples:
        for _ in range(RETAKES):
            if not sample.cpu_ms or sample.cpu_ms[0] >= LONG_MS:
                break
            if sample.wall_ms[0] <= DISTURBED * sample.cpu_ms[0]:
                break
            sample = median_sample(engine.time(self.runs, warmup=self.warmup))
        return sample


def time_after_another(engine: Engine, runs: int, warmup: int, profile: int = 0) -> Samples:
    """Time runs, the first of which follows a run of another model.

    A fast model, with the longest warm-up, in a process of its own runs ``warmup`` times before; see
    `IsolatedEngine.time_after_another`. Of others that is the first run of a turn: another engine ran just before, and
    the change of the process is a small part of the run.
    """
    own = getattr(engine, "time_after_another", None)
    at = {"profile": profile} if profile else {}
    if own is None or warmup < MOST_RUNS:
        return engine.time(runs, **at)
    taken: Samples = own(runs, warmup, **at)
    return taken


def settle(engine: Engine, clock: Clock) -> Turn:
    """Run a fresh engine until it is warm, and choose the length of its turns."""
    return Turn.lasting(warmed(engine, clock).median_ms(clock))


def warmed(engine: Engine, clock: Clock) -> Samples:
    """Run a fresh engine until it is warm, and return its last runs.

    A run that is not faster than all before it ends the warm-up of a model whose runs last longer than all untimed ones
    of a turn do together. Faster models get a fixed number of runs, which take less time than checking each of them.
    """
    taken = engine.time(1)
    if taken.median_ms(clock) < 2 * WARM_MS:
        return engine.time(SCREEN, warmup=WARMUP - 1)
    while len(taken.wall_ms) < WARMUP:
        last = engine.time(1)
        if last.on(clock)[0] > (1 - SETTLED) * min(taken.on(clock)):
            return last + engine.time(1)
        taken += last
    return engine.time(2)


def profiled(engine: Engine, typical_ms: float) -> tuple[LayerTime, ...]:
    """Layer times of an engine with this time per run; for long runs, a few are enough."""
    fitting = round(PROFILE_MS / max(typical_ms, 1e-6))
    return engine.layers(max(FEWEST_PROFILED, min(MOST_PROFILED, fitting)))


def on_each_clock(change: Callable[..., tuple[float, ...]], *several: Samples) -> Samples:
    """The first samples with ``change`` of the times of all of them: on each clock, at each profile, of first runs."""
    firsts = [samples.first for samples in several if samples.first is not None]
    profiles = zip(*(samples.profiles for samples in several), strict=True)
    return replace(
        several[0],
        wall_ms=change(*(samples.wall_ms for samples in several)),
        cpu_ms=change(*(samples.cpu_ms for samples in several)),
        profiles=tuple(on_each_clock(change, *parts) for parts in profiles),
        first=on_each_clock(change, *firsts) if len(firsts) == len(several) else None,
    )


def _part(samples: Samples, which: slice) -> Samples:
    """A slice of the runs."""
    return on_each_clock(lambda times: times[which], samples)


def _with_first(sample: Samples, first: Samples) -> Samples:
    """A sample with the first run of its turn, at each profile too."""
    profiles = tuple(map(_with_first, sample.profiles, first.profiles))
    return replace(sample, profiles=profiles, first=first)


def median_sample(samples: Samples) -> Samples:
    """Several runs of one turn as one sample: the median on each clock."""
    return on_each_clock(lambda times: (statistics.median(times),) if times else (), samples)


def _pair(turn: Turn, ours: Engine, theirs: Engine, ours_first: bool) -> tuple[Samples, Samples]:
    if ours_first:
        mine = turn.sample(ours)
        return mine, turn.sample(theirs)
    other = turn.sample(theirs)
    return turn.sample(ours), other


def _ratio(ours: Samples, theirs: Samples, clock: Clock) -> float:
    return math.exp(statistics.median(log_ratios(ours.on(clock), theirs.on(clock)).tolist()))


def decided(opponent: str, ours: Samples, theirs: Samples, clock: Clock, eps: float) -> Race:
    """The outcome of a race that ended with these samples."""
    differences = log_ratios(ours.on(clock), theirs.on(clock))
    ratio, p_value = _ratio(ours, theirs, clock), wilcoxon_p(differences)
    proved = p_value / 2 < ALPHA  # one-sided: the ratio gives the direction
    far_slower = len(differences) == FAR_SLOWER_AFTER and ratio > FAR_SLOWER
    faster, slower = proved and ratio < 1 - eps, (proved and ratio > 1 + eps) or far_slower
    return Race(
        opponent=opponent,
        ratio=ratio,
        p_value=p_value,
        pairs=len(differences),
        verdict="faster" if faster else "slower" if slower else "no difference",
        interval=_interval(differences),
    )


def _interval(differences: Floats) -> Interval | None:
    bounds = signed_rank_bounds(differences)
    return None if bounds is None else bounds.exponential


def _is_futile(ours: Samples, theirs: Samples, clock: Clock, eps: float) -> bool:
    """Whether more pairs are unlikely to help: the rank test has excluded a significant gain.

    The confidence is below that of a verdict: at 95 % half of the pairs are spent on challengers that are as fast as
    the incumbent, and wins are as frequent (docs/decisions/0038).
    """
    differences = log_ratios(ours.on(clock), theirs.on(clock))
    bounds = signed_rank_bounds(differences, FUTILE) if len(differences) >= LOOKS[0] else None
    return bounds is not None and bounds.low > math.log1p(-eps)
