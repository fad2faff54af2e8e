"""Searches for the smallest input that breaks something, with Hypothesis.

It is independent of models: it takes a strategy and a function that tries a drawn input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings, target
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from qdqspec.parity.domain import Tried
from qdqspec.parity.draw import Drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """The number of inputs tried, and the smallest that broke something, if any.

    ``late`` is whether the time ended before all were tried.
    """

    tried: int
    seconds: float
    smallest: Drawn | None
    late: bool


class _BrokenError(Exception):
    """An input that breaks something: the failure that Hypothesis shrinks."""


class _Late(BaseException):
    """The time is over and nothing was found. A BaseException, so that Hypothesis does not shrink it."""


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

    ``attempt`` returns ``None`` for an invalid input. Its answers are cached: once the time is over no new
    input is tried, and the smallest found by then is returned. One seed gives the same inputs. ``simpler``
    offers simpler inputs in place of one that Hypothesis cannot shrink further.
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
    """Answers Hypothesis, and caches the answers."""

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
            return  # while shrinking, an untried input does not count
        answer = self._answers[repr(drawn)]
        if answer is None:
            reject()
        target(answer.noise, label="noise")
        if answer.broken:
            self._smallest = drawn  # Hypothesis ends with the smallest
            raise _BrokenError

    def simplify(self, simpler: Callable[[Drawn], Iterable[Drawn]]) -> None:
        """Replace the result by a simpler input that breaks something too, repeatedly."""
        while self._smallest is not None:
            plain = next((one for one in simpler(self._smallest) if self._breaks(one)), None)
            if plain is None:
                return
            self._smallest = plain

    def _breaks(self, drawn: Drawn) -> bool:
        answer = self._answers[repr(drawn)] if self._is_known(drawn) else None
        return answer is not None and bool(answer.broken)

    def _is_known(self, drawn: Drawn) -> bool:
        """Whether the input was tried, now or before; once the time is over no new one is."""
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
    """Settings independent of Hypothesis' profiles, without its database and output."""
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
