"""Several fresh builds of several models timed in the same rounds, and the ratios of the models' times.

Position ``i`` of every build's samples belongs to the same round, so that a change of the machine's speed between
rounds affects all of them. All builds are open at once if memory allows it, else two at a time (docs/decisions/0001).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import TypeAlias

import numpy as np

from qdqspec._core.units import count_text
from qdqspec.backends import Engine, HasMemory, MemoryShortError, has_memory, is_memory_error
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.timing.race import Turn, on_each_clock, settle
from qdqspec.timing.stats import Deviation, RatioEstimate, drift, estimate_ratios
from qdqspec.types import Clock, Interval, Samples

NOTE = "timed two at a time for lack of memory: scaled by the time of the first build in the same round"

IsSettled: TypeAlias = Callable[["Together"], bool]  # whether what was measured decides
Opener: TypeAlias = Callable[[], Engine]
Openers: TypeAlias = Mapping[str, Sequence[Opener]]  # a function for each build, by model


@dataclass(frozen=True, slots=True)
class Together:
    """Samples of each group's builds, and why a group has none: a group with one failure is omitted.

    ``measurements`` is the number of times that was done; see `merged`.
    """

    samples: dict[str, list[Samples]] = field(default_factory=dict)
    failures: dict[str, QdqspecError] = field(default_factory=dict)
    measurements: int = 1

    @property
    def builds(self) -> list[Samples]:
        """The samples of all builds of all groups."""
        return list(chain.from_iterable(self.samples.values()))

    def clock(self, wanted: Clock) -> Clock:
        """The clock that all samples have: wall time if a runtime reports no processor time."""
        return wanted if all(build.cpu_ms for build in self.builds) else "wall"

    def estimates(
        self, base: str, clock: Clock, times: Deviation = (0.0, 0), profile: int | None = None
    ) -> dict[str, RatioEstimate]:
        """Every group's time over that of the ``base`` group; see `estimate_ratios` for ``times``.

        In both conditions of the caches if all builds have both; over all shape profiles, or at one of them.
        """
        groups = self.samples
        if profile is not None:
            groups = {name: [build.profiles[profile] for build in own] for name, own in groups.items()}
        conditions = [groups]
        first = {name: [build.first for build in own if build.first] for name, own in groups.items()}
        if all(len(first[name]) == len(own) for name, own in groups.items()):
            conditions.append(first)
        timed = [
            {name: [build.on(clock) for build in own] for name, own in each.items()} for each in conditions
        ]
        return estimate_ratios(timed, base, self.measurements, times)

    def joined(self, name: str) -> Samples:
        """The samples of a group's builds, one build after the other."""
        return sum(self.samples[name], Samples())

    def drift(self, clock: Clock) -> float:
        """The slowdown of the last third of the rounds against the first, over all builds."""
        return drift([build.on(clock) for build in self.builds])

    def ratios(self, base: str, clock: Clock) -> dict[str, Interval]:
        """The ratios of `estimates` with confidence intervals that enclose both conditions."""
        return {name: each.test.enclosing for name, each in self.estimates(base, clock).items()}


def merged(measurements: Sequence[Together]) -> Together:
    """The builds of several measurements of the same models as if all had been timed together.

    The times of later ones are scaled, so that the mean of all builds is equal in each round of the first.
    """
    first = measurements[0]
    rounds = min(len(build.wall_ms) for each in measurements for build in each.builds)
    note = f"measured {len(measurements)} times; later times are scaled to the first"
    samples: dict[str, list[Samples]] = {name: [] for name in first.samples}
    for each in measurements:
        scaled = partial(_scaled, rounds=rounds, first=len(first.builds))
        for name, own in each.samples.items():
            aligned = [on_each_clock(scaled, build, *first.builds, *each.builds) for build in own]
            samples[name] += [replace(build, notes=(*build.notes, note)) for build in aligned]
    return Together(samples, first.failures, measurements=len(measurements))


def _scaled(own: tuple[float, ...], *times: tuple[float, ...], rounds: int, first: int) -> tuple[float, ...]:
    """Times of one build in units of the ``first`` ones, by the means of both measurements in each round.

    They stay as they are if a clock was not recorded, or is too coarse.
    """
    if not all(each and all(each) for each in times):
        return own[:rounds]
    logs = np.log([each[:rounds] for each in times])
    factors = np.exp(logs[:first].mean(axis=0) - logs[first:].mean(axis=0))
    return tuple((np.asarray(own[:rounds]) * factors).tolist())


@dataclass(kw_only=True)
class FreshBuilds:
    """Times fresh builds, ``jobs`` of which are built in parallel.

    After ``memory`` was short once, only two are open at a time. Timing, and not building, happens inside
    ``exclusive``. ``report`` is given each step as text.

    After ``most_seconds`` of timing no round begins, but ``fewest`` rounds are timed in any case: a longer time makes
    the intervals of slow models narrower.
    """

    clock: Clock
    random: np.random.Generator
    exclusive: Callable[[], AbstractContextManager[object]] = nullcontext
    jobs: int = 1
    memory: HasMemory = has_memory
    report: Callable[[str], None] = lambda _: None
    most_seconds: float = 60.0
    fewest: int = 6
    _is_short: bool = field(default=False, init=False)

    def time(
        self,
        groups: Openers,
        rounds: int,
        *,
        beside: Sequence[Engine] = (),
        close_others: Callable[[], None],
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Samples of each group's builds. If memory is short, ``close_others`` closes the engines in ``beside``."""
        if not self._is_short:
            try:
                return self.all_at_once(groups, rounds, beside, is_settled)
            except MemoryShortError:
                self._is_short = True
        close_others()
        return self.two_at_a_time(groups, rounds)

    def all_at_once(
        self,
        groups: Openers,
        rounds: int,
        beside: Sequence[Engine] = (),
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Open all engines, warm them up, take ``rounds`` samples of each, and close them.

        It may end after each quarter of the rounds, if ``is_settled``. Raises `MemoryShortError` as soon as ``memory``
        reports that the remaining ones do not fit ``beside`` the open ones, or if one fails for lack of memory.
        """
        result, engines = Together(), dict[tuple[str, int], Engine]()  # engines of failed groups too
        left = sum(map(len, groups.values()))

        def require_memory(more: int) -> None:
            if more and not self.memory([*beside, *engines.values()], more):
                raise MemoryShortError

        with ExitStack() as opened:
            require_memory(left)
            for name, openers in self._reporting(groups).items():
                left -= len(openers)
                try:
                    for number, engine in enumerate(self._built(openers, opened)):
                        engines[name, number] = engine
                        require_memory(left + len(openers) - number - 1)
                except (BackendError, PlacementError) as error:
                    _fail(result, name, error)
                else:
                    result.samples[name] = [Samples()] * len(openers)
            with self.exclusive():
                self._take_turns(engines, rounds, result, is_settled)
        return result

    def _reporting(self, groups: Openers) -> Openers:
        """The same openers, each of which reports its position among all."""
        total, numbers = sum(map(len, groups.values())), count(1)

        def opened(opener: Opener) -> Engine:
            self.report(f"build {next(numbers)} of {total}")
            return opener()

        return {name: [partial(opened, opener) for opener in openers] for name, openers in groups.items()}

    def _built(self, openers: Sequence[Opener], opened: ExitStack) -> Iterable[Engine]:
        """The engines of one group in order, closed by ``opened``, also those built in parallel with a failed one."""

        def build(opener: Opener) -> Engine:
            engine = opener()
            opened.callback(engine.close)
            return engine

        if self.jobs == 1:
            return map(build, openers)
        pool = ThreadPoolExecutor(self.jobs)
        try:
            return [future.result() for future in [pool.submit(build, opener) for opener in openers]]
        except Exception:
            pool.shutdown(cancel_futures=True)  # none may be running while others are timed
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for a compiler

    def _take_turns(
        self, engines: Mapping[tuple[str, int], Engine], rounds: int, result: Together, is_settled: IsSettled
    ) -> None:
        keys, turns = list(engines), dict[tuple[str, int], Turn]()
        self.report(f"timing {count_text(len(engines), 'build')} in turns")
        started = time.monotonic()
        for done in range(-1, rounds):  # the first time, engines are warmed up
            is_quarter = done in (rounds // 4, rounds // 2, 3 * rounds // 4)
            is_late = time.monotonic() - started > self.most_seconds
            if done >= self.fewest and (is_late or (is_quarter and is_settled(result))):
                return
            for position in self.random.permutation(len(keys)):
                name, number = key = keys[position]
                if name not in result.samples:
                    continue
                try:
                    if done < 0:
                        turns[key] = settle(engines[key], self.clock)
                    else:
                        result.samples[name][number] += turns[key].both(engines[key])
                except BackendError as error:
                    _fail(result, name, error)
                    del result.samples[name]  # it ran before and fails now: no result for this placement

    def two_at_a_time(self, groups: Openers, rounds: int) -> Together:
        """Time builds with two engines open at a time.

        The first build of the first group stays open as the anchor. Each build in turn, the anchor too, alternates with
        it for all rounds. Its samples are scaled by the anchor's time in the same round, so that position ``i`` of
        every build's samples may be read as one round. Without an anchor all groups fail.
        """
        result, base, scale = Together(), Samples(), partial(_scaled, rounds=rounds, first=1)
        reporting = self._reporting(groups)
        first = next(iter(reporting.values()))[0]
        with ExitStack() as opened:
            try:
                anchor = opened.enter_context(closing(first()))
                with self.exclusive():
                    warm = settle(anchor, self.clock), anchor
            except (BackendError, PlacementError) as error:
                return Together(failures=dict.fromkeys(groups, error))
            for name, openers in reporting.items():
                builds = list[Samples]()
                try:
                    for opener in openers:
                        engine = nullcontext(anchor) if opener is first else closing(opener())
                        with engine as own, self.exclusive():
                            taken, beside = self._alternate(own, warm, rounds)
                        base = base if base.wall_ms else beside
                        scaled = on_each_clock(scale, taken, base, beside)
                        builds.append(replace(scaled, notes=(*scaled.notes, NOTE)))
                    result.samples[name] = builds
                except (BackendError, PlacementError) as error:
                    result.failures[name] = error
        return result

    def _alternate(self, engine: Engine, warm: tuple[Turn, Engine], rounds: int) -> tuple[Samples, Samples]:
        """One turn of an engine and of one that is ``warm`` in every round, in random order."""
        pair = (settle(engine, self.clock), engine), warm
        samples = [Samples(), Samples()]
        for _ in range(rounds):
            for side in self.random.permutation(2):
                turn, own = pair[side]
                samples[side] += turn.both(own)
        return samples[0], samples[1]


def _fail(result: Together, name: str, error: QdqspecError) -> None:
    """Omit a group, unless it may have failed because too many engines are open."""
    if is_memory_error(error):
        raise MemoryShortError from error
    result.failures[name] = error
