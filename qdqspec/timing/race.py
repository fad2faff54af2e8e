"""How engines are timed: races of two open engines, the turns of one, and several shape profiles as one.

Races are sequential Wilcoxon signed-rank tests on interleaved runs.

Two builds timed one after the other are ranked wrongly in up to 83 % of cases on a shared machine; interleaved, in a
few per cent. So a challenger is timed in pairs with the incumbent, in random order inside each pair. It wins after 6,
12, 24 or 48 pairs, at the first of these where the rank test proves the gain. It is rejected as soon as the same test
excludes a significant gain. Stopping early can miss a gain, but never claims a false one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from qdqspec._core.arrays import Array, Floats
from qdqspec._core.units import shapes_text
from qdqspec.backends import Engine
from qdqspec.timing.stats import log_ratios, signed_rank_bounds, wilcoxon_p
from qdqspec.types import Clock, Interval, LayerTime, Race, Samples

# Of one part of a turn, and before a fresh engine is timed: integer kernels are warm after five or six.
MOST_RUNS = 5


class Raced(NamedTuple):
    """The outcome of a race, with the samples of the challenger and of its opponent, pair by pair."""

    outcome: Race
    ours: Samples
    theirs: Samples

    def with_second(self, second: Raced, clock: Clock) -> Raced:
        """This race and one between other builds of the two placements as one; won if both were."""
        outcomes = self.outcome, second.outcome
        ours, theirs = self.ours + second.ours, self.theirs + second.theirs
        outcome = Race(
            opponent=self.outcome.opponent,
            ratio=math.sqrt(outcomes[0].ratio * outcomes[1].ratio),
            p_value=max(each.p_value for each in outcomes),
            pairs=sum(each.pairs for each in outcomes),
            verdict="faster" if all(each.verdict == "faster" for each in outcomes) else "no difference",
            interval=_interval(log_ratios(ours.on(clock), theirs.on(clock))),
        )
        return Raced(outcome, ours, theirs)


def race(
    challenger: Engine,
    incumbent: Engine,
    opponent: str,
    *,
    clock: Clock,
    eps: float,
    random: np.random.Generator,
    looks: Sequence[int] = (6, 12, 24, 48),
    futile: float = 0.85,
    alpha: float = 0.02,
) -> Raced:
    """Test whether a warm challenger takes less than ``1 - eps`` times the incumbent's time.

    ``opponent`` is the digest of the incumbent.

    - ``looks`` are the numbers of pairs after which the challenger may win: more end races earlier, with more false
      wins.
    - An interval with the confidence ``futile`` that excludes a gain of ``eps`` ends a race: at 95 % half of the pairs
      are spent on challengers as fast as the incumbent, and wins are as frequent (docs/decisions/0007).
    - ``alpha`` is the error of each look, one-sided: with it six pairs of one sign are the first that can decide.
    """
    engines, samples = (challenger, incumbent), [Samples(), Samples()]
    turn = Turn.lasting(max(engine.time(1).median_ms(clock) for engine in engines))
    while True:
        for side in random.permutation(2):
            samples[side] += turn.sample(engines[side])
        differences = log_ratios(*(each.on(clock) for each in samples))
        pairs = len(differences)
        bounds = _interval(differences, futile) if pairs > looks[0] else None
        is_futile = bounds is not None and bounds.low > 1 - eps  # the rank test excludes a significant gain
        if not is_futile and pairs not in looks:
            continue
        ratio, p_value = math.exp(np.median(differences)), wilcoxon_p(differences)
        verdict: Literal["faster", "slower", "no difference"] = "no difference"
        if p_value / 2 < alpha and abs(ratio - 1) > eps:  # one-sided: the ratio gives the direction
            verdict = "faster" if ratio < 1 else "slower"
        if verdict != "no difference" or pairs == looks[-1] or pairs not in looks:
            outcome = Race(
                opponent=opponent,
                ratio=ratio,
                p_value=p_value,
                pairs=pairs,
                verdict=verdict,
                interval=_interval(differences),
            )
            return Raced(outcome, *samples)


def _interval(differences: Floats, confidence: float = 0.95) -> Interval | None:
    bounds = signed_rank_bounds(differences, confidence)
    return None if bounds is None else bounds.exponential


@dataclass(frozen=True, slots=True)
class Turn:
    """The procedure of one sample of an engine: untimed runs, then the median of timed ones.

    Another engine ran just before and left the caches cold: a first run takes 2 to 60 % longer, and a model of a
    millisecond is warm after five or six, one of 12 ms or more after one. Timed runs of a turn vary less than turns do,
    so that a few give as much information as many.
    """

    warmup: int
    runs: int

    @classmethod
    def lasting(
        cls, typical_ms: float, warm_ms: float = 6.0, timed_ms: float = 3.0, cold_ms: float = 100.0
    ) -> Turn:
        """A turn for an engine with this time per run.

        Fast models run for ``warm_ms`` untimed and ``timed_ms`` timed: longer ones are warmer, and less noisy. Of a
        model that takes ``cold_ms`` a cold run is nearly as fast as a warm one.
        """
        warmup, runs = (min(MOST_RUNS, round(lasts / max(typical_ms, 1e-6))) for lasts in (warm_ms, timed_ms))
        return cls(warmup=max(warmup, int(typical_ms < cold_ms)), runs=max(1, runs))

    def sample(self, engine: Engine) -> Samples:
        """Take one sample."""
        return median_sample(engine.time(self.runs, warmup=self.warmup))

    def both(self, engine: Engine) -> Samples:
        """The sample of a turn, with a run that follows a run of another model."""
        taken = time_after_another(engine, self.runs, max(1, self.warmup))
        steady = median_sample(on_each_clock(lambda times: times[1:], taken))
        return _with_first(steady, on_each_clock(lambda times: times[:1], taken))


def time_after_another(engine: Engine, runs: int, warmup: int, profile: int = 0) -> Samples:
    """Time one run that follows a run of another model, and ``runs`` that follow ``warmup`` others of this one.

    See `IsolatedEngine.time_after_another` for a fast model in a process of its own. Of others the first run of a turn
    is the one after another model: the change of the process is a small part of it.
    """
    own = getattr(engine, "time_after_another", None)
    at = {"profile": profile} if profile else {}
    if own is None or warmup < MOST_RUNS:
        return on_each_clock(lambda times: times[:1] + times[warmup:], engine.time(warmup + runs, **at))
    taken: Samples = own(runs, warmup, **at)
    return taken


def settle(engine: Engine, clock: Clock) -> Turn:
    """Run a fresh engine until it is warm, and choose the length of its turns."""
    return Turn.lasting(warmed(engine, clock).median_ms(clock))


def warmed(engine: Engine, clock: Clock, short_ms: float = 12.0, settled: float = 0.02) -> Samples:
    """Run a fresh engine until it is warm, and return its last runs.

    A run that is not by the share ``settled`` faster than all before it ends the warm-up. Models faster than
    ``short_ms`` get a fixed number of runs.
    """
    taken = engine.time(1)
    if taken.median_ms(clock) < short_ms:
        return engine.time(3, warmup=MOST_RUNS - 1)
    while len(taken.wall_ms) < MOST_RUNS:
        last = engine.time(1)
        if last.on(clock)[0] > (1 - settled) * min(taken.on(clock)):
            return last + engine.time(1)
        taken += last
    return engine.time(2)


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


def median_sample(samples: Samples) -> Samples:
    """Several runs of one turn as one sample: the median on each clock."""
    return on_each_clock(lambda times: (statistics.median(times),) if times else (), samples)


def _with_first(sample: Samples, first: Samples) -> Samples:
    """A sample with the first run of its turn, at each profile too."""
    profiles = tuple(map(_with_first, sample.profiles, first.profiles))
    return replace(sample, profiles=profiles, first=first)


# ---- several shape profiles as one --------------------------------------------------------------

# The objective is the weighted geometric mean of the ratios to the reference, one ratio per profile, which equals the
# ratio of weighted geometric means of times: so one sample of such an engine combines a run at every profile. Races,
# intervals and gates are independent of profiles; the samples of each profile are kept in addition.


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The inputs for timing at one shape profile. Shares of all profiles add up to one."""

    feeds: Mapping[str, Array]
    share: float = 1.0

    @property
    def name(self) -> str:
        """Its shapes as text."""
        return shapes_text({name: value.shape for name, value in self.feeds.items()})


def attach(engine: Engine, loads: Sequence[Load]) -> Engine:
    """Bind the inputs of an engine; returns an engine that times all profiles. Closes it on failure."""
    try:
        engine.bind(loads[0].feeds)
        for profile, load in enumerate(loads[1:], 1):
            engine.bind(load.feeds, profile=profile)
    except BaseException:
        engine.close()
        raise
    if len(loads) == 1:
        return engine
    return cast("Engine", AllProfiles(engine, tuple(load.share for load in loads)))


class AllProfiles:
    """An engine timed at all its profiles in turn, else the engine itself. The inputs must already be bound."""

    def __init__(self, engine: Engine, shares: Sequence[float]) -> None:
        self._engine = engine
        self._shares = tuple(shares)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:  # noqa: ARG002 - it times them all
        """Time every profile; a sample is the weighted geometric mean of one run at each."""
        parts = [self._engine.time(runs, warmup, profile=number) for number, _ in enumerate(self._shares)]
        return as_one(parts, self._shares)

    def time_after_another(self, runs: int, warmup: int) -> Samples:
        """Like `time`, with a run after another model first, at every profile."""
        profiles = range(len(self._shares))
        parts = [time_after_another(self._engine, runs, warmup, profile=number) for number in profiles]
        return as_one(parts, self._shares)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:  # noqa: ARG002 - of them all
        """Layers with their shares of the objective."""
        parts = [self._engine.layers(runs, profile=number) for number, _ in enumerate(self._shares)]
        return merged_layers(parts, self._shares)


def as_one(parts: Sequence[Samples], shares: Sequence[float]) -> Samples:
    """Combine samples of the profiles, run by run; those of each profile are kept in ``profiles``."""
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    wall = _means([part.wall_ms for part in parts], shares)
    cpu = _means([part.cpu_ms for part in parts], shares) if all(part.cpu_ms for part in parts) else ()
    return Samples(wall_ms=wall, cpu_ms=cpu, notes=notes, profiles=tuple(parts))


def merged_layers(parts: Sequence[tuple[LayerTime, ...]], shares: Sequence[float]) -> tuple[LayerTime, ...]:
    """Combine layers of the profiles; a layer's time is its weight in the objective.

    A small change of a layer's time changes the logarithm of the objective by its share of its profile's total, times
    the profile's share. Layers with equal names and nodes are added up; the total is the mean of the totals.
    """
    wholes = [math.fsum(layer.milliseconds for layer in part) for part in parts]
    if not all(wholes):
        return parts[0]
    (scale,) = _means([(whole,) for whole in wholes], shares)
    found: dict[tuple[object, ...], LayerTime] = {}
    for part, whole, share in zip(parts, wholes, shares, strict=True):
        seen: Counter[LayerTime] = Counter()  # two kernels may belong to one node
        for layer in part:
            kernel = replace(layer, name="", milliseconds=0.0, place="")
            seen[kernel] += 1
            known = found.get((kernel, seen[kernel]), replace(layer, milliseconds=0.0))
            milliseconds = known.milliseconds + layer.milliseconds / whole * share * scale
            found[kernel, seen[kernel]] = replace(known, milliseconds=milliseconds)
    return tuple(found.values())


def _means(columns: Sequence[Sequence[float]], shares: Sequence[float]) -> tuple[float, ...]:
    """The weighted geometric mean of each row."""
    return tuple(
        math.exp(math.fsum(share * math.log(value) for share, value in zip(shares, row, strict=True)))
        for row in zip(*columns, strict=True)
    )
