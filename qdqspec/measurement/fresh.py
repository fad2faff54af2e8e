"""Times fresh builds against each other: all at once if memory allows, else two at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.measurement.memory import HasMemory, MemoryShortError, has_memory
from qdqspec.measurement.race import Turn, settle
from qdqspec.measurement.stats import log_ratios, trimmed_error
from qdqspec.measurement.together import (
    ENOUGH,
    FEWEST,
    IsSettled,
    Opener,
    Take,
    Together,
    joined,
    time_together,
)
from qdqspec.types import Clock, Samples


@dataclass
class FreshBuilds:
    """Times fresh builds with ``jobs`` parallel builds; after memory was short once, only two are open at a time."""

    clock: Clock
    random: np.random.Generator
    exclusive: Callable[[], AbstractContextManager[object]]
    jobs: int = 1
    memory: HasMemory = has_memory
    _is_short: bool = field(default=False, init=False)

    def time(
        self,
        groups: Mapping[str, Sequence[Opener]],
        rounds: int,
        *,
        beside: Sequence[Engine] = (),
        make_room: Callable[[], None],
        take: Take = Turn.both,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Samples of each group's builds. If memory is short, ``make_room`` closes the engines in ``beside``."""
        clock, random, exclusive = self.clock, self.random, self.exclusive
        if not self._is_short:
            try:
                return time_together(
                    groups,
                    rounds,
                    clock=clock,
                    random=random,
                    exclusive=exclusive,
                    jobs=self.jobs,
                    memory=self.memory,
                    beside=beside,
                    take=take,
                    is_settled=is_settled,
                )
            except MemoryShortError:
                self._is_short = True
        make_room()
        return time_two_at_a_time(groups, rounds, clock=clock, random=random, exclusive=exclusive, take=take)


# Times builds one at a time against an anchor build that stays open: two engines in memory at most.
# For models that take so much memory that not all builds can be open at once (docs/decisions/0034).

NOTE = "timed two at a time for want of memory: scaled by what the first build took in the same round"


_Sample: TypeAlias = Callable[[], Samples]


class _LostError(Exception):
    """The anchor engine, against which all others are timed, has failed."""

    def __init__(self, error: QdqspecError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Pair:
    """Samples of a build and of the anchor, round by round."""

    ours: Samples
    anchor: Samples


def time_two_at_a_time(
    groups: Mapping[str, Sequence[Opener]],
    rounds: int,
    *,
    clock: Clock,
    random: np.random.Generator,
    exclusive: Callable[[], AbstractContextManager[object]],
    take: Take = Turn.both,
) -> Together:
    """Time builds as `time_together` does, with two engines open at a time.

    The first build of the first group stays open as the anchor. Each build in turn, the anchor too, alternates with it
    for all rounds, in random order. Its samples are normalized: multiplied by the anchor's median time over the
    anchor's time in the same round, so that position ``i`` of every build's samples may be read as one round. Each
    sample carries the noise of two turns, also for the first build, which is timed against itself. From half of the
    rounds on, the first build ends when more runs add no information, and the others take as many rounds.
    """
    left, failures = dict(groups), {}
    while left:
        try:
            found = _beside_first(left, rounds, clock, random, exclusive, take)
        except _LostError as lost:
            name = next(iter(left))  # its measurements cannot be compared with others: start again
            failures[name] = lost.error
            del left[name]
        else:
            return replace(found, failures=failures | found.failures)
    return Together(failures=failures)


def _beside_first(
    groups: Mapping[str, Sequence[Opener]],
    rounds: int,
    clock: Clock,
    random: np.random.Generator,
    exclusive: Callable[[], AbstractContextManager[object]],
    take: Take,
) -> Together:
    pairs: dict[str, list[_Pair]] = {}
    failures: dict[str, QdqspecError] = {}
    (first, opener), *others = ((name, opener) for name, openers in groups.items() for opener in openers)
    with _lost_if_it_fails():
        anchor = opener()
    with closing(anchor):
        with exclusive(), _lost_if_it_fails():
            beside = _warm(anchor, clock, take)
            pair = _alternate(
                beside, beside, rounds, random, enough=lambda pair: _is_known(pair, rounds, clock)
            )
        pairs[first] = [pair]
        rounds = len(pair.ours.wall_ms)
        for name, opener in others:
            if name in failures:
                continue
            try:
                with closing(opener()) as engine, exclusive():
                    pairs.setdefault(name, []).append(
                        _alternate(beside, _warm(engine, clock, take), rounds, random)
                    )
            except (BackendError, PlacementError) as error:
                failures[name] = error
                pairs.pop(name, None)
    typical = joined([pair.anchor for group in pairs.values() for pair in group])
    # of each build, normalized by the anchor's time in the same round
    scaled = {n: [_scaled(pair.ours, pair.anchor, typical) for pair in group] for n, group in pairs.items()}
    samples = {n: [replace(each, notes=(*each.notes, NOTE)) for each in group] for n, group in scaled.items()}
    return Together(samples, failures=failures)


def _warm(engine: Engine, clock: Clock, take: Take) -> _Sample:
    """A function that takes one sample of an engine, warmed up."""
    return partial(take, settle(engine, clock), engine)


def _alternate(
    anchor: _Sample,
    ours: _Sample,
    rounds: int,
    random: np.random.Generator,
    *,
    enough: Callable[[_Pair], bool] = lambda _: False,
) -> _Pair:
    """One turn of each in every round, in random order."""
    pair = _Pair(Samples(), Samples())
    for _ in range(rounds):
        if enough(pair):
            break
        for is_ours in random.permutation(2):
            if is_ours:
                pair = replace(pair, ours=pair.ours + ours())
            else:
                with _lost_if_it_fails():
                    pair = replace(pair, anchor=pair.anchor + anchor())
    return pair


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except (BackendError, PlacementError) as error:
        raise _LostError(error) from error


def _is_known(pair: _Pair, rounds: int, clock: Clock) -> bool:
    """Whether more rounds add no information, by the criterion of `time_together`."""
    if len(pair.ours.wall_ms) < max(FEWEST, rounds // 2):
        return False
    return trimmed_error(log_ratios(pair.ours.on(clock), pair.anchor.on(clock))) <= ENOUGH


def _scaled(ours: Samples, anchor: Samples, typical: Samples) -> Samples:
    return replace(
        ours,
        wall_ms=_by_round(ours.wall_ms, anchor.wall_ms, typical.wall_ms),
        cpu_ms=_by_round(ours.cpu_ms, anchor.cpu_ms, typical.cpu_ms),
        profiles=tuple(
            _scaled(*parts) for parts in zip(ours.profiles, anchor.profiles, typical.profiles, strict=True)
        ),
        first=(
            _scaled(ours.first, anchor.first, typical.first)
            if ours.first and anchor.first and typical.first
            else None
        ),
    )


def _by_round(ours: Sequence[float], anchor: Sequence[float], typical: Sequence[float]) -> tuple[float, ...]:
    if not anchor or not all(anchor):  # the clock was not recorded, or is too coarse
        return tuple(ours)
    median = statistics.median(typical)
    return tuple(time * median / beside for time, beside in zip(ours, anchor, strict=True))
