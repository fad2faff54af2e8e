"""Several builds of several models timed in the same rounds: their ratios, and looks at two builds that stay open.

`FreshBuilds` times one turn of each build in every round, in random order. Position ``i`` of every build's samples
belongs to the same round, so that a change of the machine's speed between rounds affects all of them. All builds are
open at once if memory allows it, else two at a time (docs/decisions/0034).

A measurement of some seconds is made in one state of the machine: its frequency, other guests, the placement of
memory. A change of state changes the ratio itself, and neither more rounds nor more builds within these seconds
show this. So during a search two builds that stay open, the reference and the incumbent, are timed against each
other repeatedly (`Looks`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import TypeAlias

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.measurement.memory import HasMemory, MemoryShortError, has_memory, is_memory_error
from qdqspec.measurement.race import Turn, on_each_clock, settle
from qdqspec.measurement.stats import (
    enclosed_ratios,
    log_ratios,
    predicted_ratios,
    ratio_tests,
    time_deviation,
    trimmed_error,
)
from qdqspec.types import Clock, Interval, RatioTest, Samples
from qdqspec.units import count_text

IsSettled: TypeAlias = Callable[["Together"], bool]  # whether what was measured decides
Take: TypeAlias = Callable[[Turn, Engine], Samples]  # how a turn is taken: `Turn.sample` or `Turn.both`


@dataclass(frozen=True, slots=True)
class Together:
    """Samples of each group's builds, and why a group has none: a group with one failure is omitted.

    ``measurements`` is the number of times that was done, each with builds of its own; see `merged`.
    """

    samples: dict[str, list[Samples]] = field(default_factory=dict)
    failures: dict[str, QdqspecError] = field(default_factory=dict)
    measurements: int = 1


def ratios_between(
    groups: Mapping[str, Sequence[Samples]],
    base: str,
    clock: Clock,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every group's time over that of the ``base`` group, with confidence intervals that enclose both conditions.

    In both conditions if all builds have both. Each group has the samples of its fresh builds; see `enclosed_ratios`,
    and `ratio_intervals` for ``times``.
    """
    return enclosed_ratios(*_conditions(groups, clock), base, measurements, times)


def ratio_tests_between(
    groups: Mapping[str, Sequence[Samples]],
    base: str,
    clock: Clock,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, RatioTest]:
    """Every group's time over that of the ``base`` group, for tests of a gain; see `ratio_tests`."""
    return ratio_tests(*_conditions(groups, clock), base, measurements, times)


def predictions_between(
    groups: Mapping[str, Sequence[Samples]],
    base: str,
    clock: Clock,
    measurements: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every group's time over that of the ``base`` group as another program will measure it; see `predicted_ratios`."""
    return predicted_ratios(*_conditions(groups, clock), base, measurements, times)


_Times: TypeAlias = dict[str, list[tuple[float, ...]]]  # of the builds, by group


def _conditions(groups: Mapping[str, Sequence[Samples]], clock: Clock) -> tuple[_Times, _Times]:
    """Times of runs in a row, and of first runs after another model, which are empty unless all builds have them."""
    steady = {name: [build.on(clock) for build in builds] for name, builds in groups.items()}
    if not all(build.first for builds in groups.values() for build in builds):
        return steady, {}
    first = {
        name: [build.first.on(clock) for build in builds if build.first] for name, builds in groups.items()
    }
    return steady, first


def common_clock(wanted: Clock, groups: Mapping[str, Sequence[Samples]]) -> Clock:
    """The clock that all samples have: wall time if a runtime reports no processor time."""
    has_cpu = all(build.cpu_ms for builds in groups.values() for build in builds)
    return wanted if has_cpu else "wall"


def joined(builds: Sequence[Samples]) -> Samples:
    """The samples of several builds, one build after the other."""
    total = Samples()
    for build in builds:
        total += build
    return total


def merged(measurements: Sequence[Together]) -> Together:
    """The builds of several measurements of the same models as if all had been timed together.

    The rounds of the first measurement are kept; those of the others are scaled, so that the mean of all builds is
    equal in each round.
    """
    first = measurements[0]
    every = [list(chain.from_iterable(each.samples.values())) for each in measurements]
    rounds = min(len(build.wall_ms) for builds in every for build in builds)
    note = f"measured {len(measurements)} times; later times are scaled to the first"
    samples: dict[str, list[Samples]] = {name: [] for name in first.samples}
    for each, builds in zip(measurements, every, strict=True):
        scaled = partial(_scaled, rounds=rounds, first=len(every[0]))
        for name, own in each.samples.items():
            aligned = [on_each_clock(scaled, build, *every[0], *builds) for build in own]
            samples[name] += [replace(build, notes=(*build.notes, note)) for build in aligned]
    return Together(samples, first.failures, measurements=len(measurements))


def _scaled(own: tuple[float, ...], *times: tuple[float, ...], rounds: int, first: int) -> tuple[float, ...]:
    """Times of one build in units of the ``first`` ones, by the means of both measurements in each round."""
    if not all(times):
        return ()
    logs = np.log([each[:rounds] for each in times])
    return tuple(
        (np.asarray(own[:rounds]) * np.exp(logs[:first].mean(axis=0) - logs[first:].mean(axis=0))).tolist()
    )


APART = 20  # durations of a look pass before the next one: looks take a twentieth of a search
LEAST_SECONDS = 5.0  # between two looks
LOOK_ROUNDS, FEWEST_LOOK_ROUNDS = 6, 3
LOOK_SECONDS = 0.5  # after so long no further round of a look begins


class Looks:
    """The looks of one search. ``seconds`` is the duration of the last one, at first that of the builds it needs."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: np.random.Generator,
        memory: HasMemory = has_memory,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference: Engine | None = None
        self.seconds = 0.0
        self._clock: Clock = clock
        self._random = random
        self._memory = memory
        self._now = now
        self._ended = now()
        self._beside: Engine | None = None  # the engine of the last series
        self._turn = Turn.lasting(0.0)
        self._series: list[list[Floats]] = []

    @property
    def deviation(self) -> tuple[float, int]:
        """The deviation of a log ratio between times, and its degrees of freedom; see `time_deviation`."""
        return time_deviation(self._series)

    def take_if_due(self, incumbent: Engine, open_reference: Callable[[], Engine]) -> None:
        """Look at the reference and the incumbent if the last look is long enough ago and memory allows it.

        The reference is opened once and stays open. An engine that fails ends the look; a race finds the cause.
        """
        started = self._now()
        if started - self._ended < max(LEAST_SECONDS, APART * self.seconds):
            return
        try:
            if self.reference is None and self._memory([incumbent], 1):
                self.reference = open_reference()
            if self.reference is not None:
                self._take(self.reference, incumbent)
        except BackendError:
            self.close()
        self._ended = self._now()
        self.seconds = self._ended - started

    def close(self) -> None:
        """Close the reference; the looks taken so far stay."""
        if self.reference is not None:
            self.reference.close()
        self.reference = self._beside = None

    def _take(self, reference: Engine, incumbent: Engine) -> None:
        engines = reference, incumbent
        if incumbent is not self._beside:
            turns = [settle(engine, self._clock) for engine in engines]
            self._beside, self._turn = incumbent, min(turns, key=lambda turn: turn.runs)
            self._series.append([])
        else:
            for engine in engines:
                self._turn.sample(engine)
        samples = [Samples(), Samples()]
        started = self._now()
        for number in range(LOOK_ROUNDS):
            if number >= FEWEST_LOOK_ROUNDS and self._now() - started > LOOK_SECONDS:
                break
            for position in self._random.permutation(2):
                samples[position] += self._turn.sample(engines[position])
        theirs, ours = (taken.on(self._clock) for taken in samples)
        self._series[-1].append(log_ratios(ours, theirs))


FEWEST = 6  # rounds before the precision of levels is evaluated
MOST_SECONDS = 60.0  # of timing, after which no further round begins once there are the fewest
ENOUGH = 0.0025  # standard error of a build's level, a quarter of the smallest significant difference
NOTE = "timed two at a time for lack of memory: scaled by the time of the first build in the same round"

Opener: TypeAlias = Callable[[], Engine]
Openers: TypeAlias = Mapping[str, Sequence[Opener]]  # a function for each build, by model


@dataclass
class FreshBuilds:
    """Times fresh builds with ``jobs`` parallel builds; after memory was short once, only two are open at a time.

    Timing, and not building, happens inside ``exclusive``. ``report`` is given each step as text.
    """

    clock: Clock
    random: np.random.Generator
    exclusive: Callable[[], AbstractContextManager[object]]
    jobs: int = 1
    memory: HasMemory = has_memory
    report: Callable[[str], None] = lambda _: None
    _is_short: bool = field(default=False, init=False)

    def time(
        self,
        groups: Openers,
        rounds: int,
        *,
        beside: Sequence[Engine] = (),
        close_others: Callable[[], None],
        take: Take = Turn.both,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Samples of each group's builds. If memory is short, ``close_others`` closes the engines in ``beside``."""
        if not self._is_short:
            try:
                return self.all_at_once(groups, rounds, beside=beside, take=take, is_settled=is_settled)
            except MemoryShortError:
                self._is_short = True
        close_others()
        return self.two_at_a_time(groups, rounds, take=take)

    def all_at_once(
        self,
        groups: Openers,
        rounds: int,
        *,
        beside: Sequence[Engine] = (),
        take: Take = Turn.both,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Open all engines, warm them up, take ``rounds`` samples of each, and close them.

        From half of the rounds on it ends when more runs add no information: the remaining variation is between builds.
        After half and three quarters of the rounds it ends if ``is_settled``.
        Slow models get fewer rounds (`MOST_SECONDS`).
        Timing begins when all are built. Raises `MemoryShortError` as soon as ``memory`` reports that the remaining
        ones do not fit ``beside`` the open ones, or if one fails for lack of memory.
        """
        result, groups = Together(), self._counted(groups)
        to_come = Counter({name: len(openers) for name, openers in groups.items()})
        self._look_ahead(beside, to_come)
        with ExitStack() as opened:
            engines: list[tuple[str, int, Engine]] = []
            for name, openers in groups.items():
                try:
                    for index, engine in enumerate(self._opened(openers, opened)):
                        engines.append((name, index, engine))
                        to_come[name] -= 1
                        self._look_ahead([*beside, *(each for _, _, each in engines)], to_come)
                except (BackendError, PlacementError) as error:
                    _fail(result, name, error)
                    del to_come[name]
            built = (name for name in groups if name not in result.failures)
            result.samples.update({name: [Samples()] * len(groups[name]) for name in built})
            with self.exclusive():
                self._take_turns(engines, rounds, result, take, is_settled)
        return result

    def _counted(self, groups: Openers) -> Openers:
        """The same openers, each of which reports its position among all."""
        total, numbers = sum(map(len, groups.values())), count(1)

        def opened(opener: Opener) -> Engine:
            self.report(f"build {next(numbers)} of {total}")
            return opener()

        return {name: [partial(opened, opener) for opener in openers] for name, openers in groups.items()}

    def _look_ahead(self, engines: Sequence[Engine], to_come: Counter[str]) -> None:
        more = to_come.total()
        if more and not self.memory(engines, more):
            raise MemoryShortError

    def _opened(self, openers: Sequence[Opener], opened: ExitStack) -> Iterator[Engine]:
        """The engines of one group in order, closed by ``opened``, also those built in parallel with a failed one."""

        def build(opener: Opener) -> Engine:
            engine = opener()
            opened.callback(engine.close)
            return engine

        if self.jobs == 1:
            yield from map(build, openers)
            return
        pool = ThreadPoolExecutor(self.jobs)
        try:
            futures = [pool.submit(build, opener) for opener in openers]
            yield from [future.result() for future in futures]
        except Exception:
            pool.shutdown(cancel_futures=True)  # none may be running while others are timed
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for a compiler

    def _take_turns(
        self,
        engines: Sequence[tuple[str, int, Engine]],
        rounds: int,
        result: Together,
        take: Take,
        is_settled: IsSettled,
    ) -> None:
        turns: dict[tuple[str, int], Turn] = {}
        started = time.monotonic()
        for number in range(rounds + 1):
            if number > FEWEST and time.monotonic() - started > MOST_SECONDS:
                return
            if number > max(FEWEST, rounds // 2) and _are_precise(result, self.clock):
                return
            if number - 1 in (rounds // 2, 3 * rounds // 4) and number > FEWEST and is_settled(result):
                return
            if number % max(1, rounds // 4) == 0:  # rarely, since drawing affects the next run
                now = f", round {number} of {rounds}" if number else ""
                self.report(f"timing {count_text(len(engines), 'build')} in turns{now}")
            for position in self.random.permutation(len(engines)):
                name, index, engine = engines[position]
                if name not in result.samples:
                    continue
                try:
                    if number == 0:
                        turns[name, index] = settle(engine, self.clock)
                    else:
                        result.samples[name][index] += take(turns[name, index], engine)
                except BackendError as error:
                    _fail(result, name, error)
                    del result.samples[name]  # it ran before and fails now: no result for this placement

    def two_at_a_time(self, groups: Openers, rounds: int, *, take: Take = Turn.both) -> Together:
        """Time builds as `all_at_once` does, with two engines open at a time.

        The first build of the first group stays open as the anchor. Each build in turn, the anchor too, alternates with
        it for all rounds, in random order. Its samples are normalized: multiplied by the anchor's median time over the
        anchor's time in the same round, so that position ``i`` of every build's samples may be read as one round. Each
        sample carries the noise of two turns, also for the first build, which is timed against itself. From half of the
        rounds on, the first build ends when more runs add no information, and the others take as many rounds.
        """
        left, failures = dict(groups), {}
        while left:
            try:
                found = self._beside_first(left, rounds, take)
            except _LostError as lost:
                name = next(iter(left))  # its measurements cannot be compared with others: start again
                failures[name] = lost.error
                del left[name]
            else:
                return replace(found, failures=failures | found.failures)
        return Together(failures=failures)

    def _beside_first(self, groups: Openers, rounds: int, take: Take) -> Together:
        pairs: dict[str, list[_Pair]] = {}
        failures: dict[str, QdqspecError] = {}
        groups = self._counted(groups)
        (first, opener), *others = ((name, opener) for name, openers in groups.items() for opener in openers)
        with _lost_if_it_fails():
            anchor = opener()
        with closing(anchor):
            with self.exclusive(), _lost_if_it_fails():
                beside = self._warm(anchor, take)
                pair = self._alternate(beside, beside, rounds, may_end=True)
            pairs[first] = [pair]
            rounds = len(pair[0].wall_ms)
            for name, opener in others:
                if name in failures:
                    continue
                try:
                    with closing(opener()) as engine, self.exclusive():
                        pair = self._alternate(beside, self._warm(engine, take), rounds)
                        pairs.setdefault(name, []).append(pair)
                except (BackendError, PlacementError) as error:
                    failures[name] = error
                    pairs.pop(name, None)
        typical = joined([anchor for group in pairs.values() for _, anchor in group])
        # of each build, normalized by the anchor's time in the same round
        noted: dict[str, list[Samples]] = {}
        for name, group in pairs.items():
            scaled = [on_each_clock(_by_round, *pair, typical) for pair in group]
            noted[name] = [replace(each, notes=(*each.notes, NOTE)) for each in scaled]
        return Together(noted, failures=failures)

    def _warm(self, engine: Engine, take: Take) -> Callable[[], Samples]:
        """A function that takes one sample of an engine, warmed up."""
        return partial(take, settle(engine, self.clock), engine)

    def _alternate(
        self,
        anchor: Callable[[], Samples],
        ours: Callable[[], Samples],
        rounds: int,
        *,
        may_end: bool = False,
    ) -> _Pair:
        """One turn of each in every round, in random order; it ``may_end`` when more rounds add no information."""
        taken, beside = Samples(), Samples()
        for number in range(rounds):
            if may_end and number >= max(FEWEST, rounds // 2):
                apart = log_ratios(taken.on(self.clock), beside.on(self.clock))
                if trimmed_error(apart) <= ENOUGH:
                    break
            for is_ours in self.random.permutation(2):
                if is_ours:
                    taken += ours()
                else:
                    with _lost_if_it_fails():
                        beside += anchor()
        return taken, beside


def _fail(result: Together, name: str, error: QdqspecError) -> None:
    """Omit a group, unless it may have failed because too many engines are open."""
    if is_memory_error(error):
        raise MemoryShortError from error
    result.failures[name] = error


def _are_precise(result: Together, clock: Clock) -> bool:
    """Whether each build's level, relative to the others' in the same rounds, is known precisely enough."""
    logs = np.log([build.on(clock) for group in result.samples.values() for build in group])
    if len(logs) < 2:
        return False
    return all(trimmed_error(apart) <= ENOUGH for apart in logs - logs.mean(axis=0))


_Pair: TypeAlias = tuple[Samples, Samples]  # of a build and of the anchor, round by round


class _LostError(Exception):
    """The anchor engine, against which all others are timed, has failed."""

    def __init__(self, error: QdqspecError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except (BackendError, PlacementError) as error:
        raise _LostError(error) from error


def _by_round(ours: Sequence[float], anchor: Sequence[float], typical: Sequence[float]) -> tuple[float, ...]:
    if not anchor or not all(anchor):  # the clock was not recorded, or is too coarse
        return tuple(ours)
    median = statistics.median(typical)
    return tuple(time * median / beside for time, beside in zip(ours, anchor, strict=True))
