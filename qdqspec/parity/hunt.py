"""Looks for the smallest input that breaks something, with Hypothesis.

It knows nothing of models: it is given what to draw from and a function that tries what was drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings, target
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from qdqspec.parity.draw import Drawn
from qdqspec.parity.tried import Tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """How many inputs were tried, and the smallest that broke something, if any did.

    ``late`` is whether the time was over before all were tried.
    """

    tried: int
    seconds: float
    smallest: Drawn | None
    late: bool


class _BrokenError(Exception):
    """An input that breaks something: what Hypothesis looks for, and shrinks."""


class _Late(BaseException):
    """The time is over and nothing was found: no exception of the kind that Hypothesis would look into."""


def hunt(
    strategy: SearchStrategy[Drawn],
    attempt: Callable[[Drawn], Tried | None],
    *,
    examples: int,
    seconds: float,
    seed_number: int,
    simpler: Callable[[Drawn], Iterable[Drawn]] = lambda _: (),
    clock: Callable[[], float] = time.monotonic,
) -> Hunt:
    """Try up to ``examples`` drawn inputs for up to ``seconds``, and shrink the first that breaks something.

    ``attempt`` returns ``None`` for an input that is none. What it said of an input is remembered: once the time is
    over nothing new is tried, and what was found by then is what is returned. One seed gives the same inputs.
    ``simpler`` offers simpler inputs in place of one that Hypothesis cannot make smaller.
    """
    hunter = _Hunter(attempt, seconds, clock)

    @seed(seed_number)
    @_settings(examples)
    @given(strategy)
    def look(drawn: Drawn) -> None:
        hunter.look(drawn)

    with suppress(_BrokenError, _Late, Unsatisfiable):
        look()
    hunter.simplify(simpler)
    return hunter.result()


class _Hunter:
    """Answers Hypothesis, and remembers the answers."""

    def __init__(
        self, attempt: Callable[[Drawn], Tried | None], seconds: float, clock: Callable[[], float]
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._started = clock()
        self._stop = self._started + seconds
        self._answers: dict[str, Tried | None] = {}
        self._smallest: Drawn | None = None
        self._late = False

    def look(self, drawn: Drawn) -> None:
        if not self._is_known(drawn):
            if self._smallest is None:
                raise _Late
            return  # while shrinking: what is not known to break something does not count
        answer = self._answers[repr(drawn)]
        if answer is None:
            reject()
        target(answer.noise, label="noise")
        if answer.broken:
            self._smallest = drawn  # Hypothesis ends with the smallest
            raise _BrokenError

    def simplify(self, simpler: Callable[[Drawn], Iterable[Drawn]]) -> None:
        """Take what is simpler and breaks something too, as long as there is any."""
        while self._smallest is not None:
            plain = next((one for one in simpler(self._smallest) if self._breaks(one)), None)
            if plain is None:
                return
            self._smallest = plain

    def _breaks(self, drawn: Drawn) -> bool:
        answer = self._answers[repr(drawn)] if self._is_known(drawn) else None
        return answer is not None and bool(answer.broken)

    def _is_known(self, drawn: Drawn) -> bool:
        """Whether it was tried, now or before; once the time is over nothing is tried any more."""
        key = repr(drawn)
        if key not in self._answers:
            if self._clock() >= self._stop:
                self._late = True
                return False
            self._answers[key] = self._attempt(drawn)
        return True

    def result(self) -> Hunt:
        return Hunt(
            tried=sum(answer is not None for answer in self._answers.values()),
            seconds=self._clock() - self._started,
            smallest=self._smallest,
            late=self._late,
        )


def _settings(examples: int) -> settings:
    """Nothing of Hypothesis' own profile, and nothing that it would keep or print."""
    return settings(
        max_examples=examples,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
