"""Searches for the smallest input that breaks something, with Hypothesis: recipes are drawn, tried and shrunk.

All that is drawn is made of single bits. Hypothesis mixes constants of imported code into the integers and floats
that it draws, and stores those constants in a folder of the working directory. Bits avoid both, so that one
seed gives the same inputs everywhere. Simpler inputs take fewer bits or smaller ones, and Hypothesis shrinks
towards these: smaller shapes, values seen in data, the kinds in the order listed below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings, target
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn, SearchStrategy

from qdqspec._core.arrays import Array
from qdqspec.accuracy.domain import AxisRange, InputDomain, InputResult, Recipe, RecipeKind, Span

Drawn: TypeAlias = dict[str, Recipe]  # by input
T = TypeVar("T")

_FLOATS: tuple[RecipeKind, ...] = (
    "zeros", "constant", "uniform", "normal", "spike", "alternating", "denormal", "sample",
)  # fmt: skip
_WHOLE: tuple[RecipeKind, ...] = ("zeros", "constant", "uniform", "sample")
_LEVELS = 6  # bits of a value between two bounds
_SEEDS = 8  # bits
_PLACES = 4  # bits: the positions of a spike
_GAINS = (1.0, 0.5, 2.0, 0.25, 1.5, 0.0625, -1.0, 4.0)  # factors of samples
_FEW = 32  # values of one array
_SHIFTS = (0.0, 0.125, -0.125, 0.5)  # offsets of samples, in widths of the known range


def simpler(drawn: Drawn, domains: Sequence[InputDomain], made: Mapping[str, Array]) -> Iterator[Drawn]:
    """Variants with smaller shapes, or with one input made in a simpler way, the simplest first.

    ``made`` are the arrays of the inputs drawn. Hypothesis makes bits smaller, and rarely changes one kind of
    input to another.
    """
    for profile in range(len(domains[0].shapes) if domains else 0):
        yield from _smaller(drawn, domains, profile)
    for domain in domains:
        recipe = drawn[domain.name]
        for plain in _plain_recipes(domain, recipe, made[domain.name]):
            if plain == recipe:
                break
            yield {**drawn, domain.name: plain}


def _smaller(drawn: Drawn, domains: Sequence[InputDomain], profile: int) -> Iterator[Drawn]:
    """With the least lengths for all axes, and for one axis after the other."""
    axes = {axis.name: axis.least for domain in domains for axis in domain.shapes[profile]}
    for names in ({*axes}, *({name} for name in axes)):
        changed = {
            domain.name: _shortened(drawn[domain.name], domain.shapes[profile], names) for domain in domains
        }
        if changed != drawn and all(changed.values()):
            yield {name: recipe for name, recipe in changed.items() if recipe is not None}


def _shortened(recipe: Recipe, axes: tuple[AxisRange, ...], names: Collection[str]) -> Recipe | None:
    """The recipe with the named axes at their least; ``None`` if its shape is of another profile."""
    lengths = list(zip(axes, recipe.shape, strict=False))
    if len(axes) != len(recipe.shape) or any(not axis.least <= n <= axis.most for axis, n in lengths):
        return None
    shape = tuple(axis.least if axis.name in names else length for axis, length in lengths)
    return replace(recipe, shape=shape)


def _plain_recipes(domain: InputDomain, recipe: Recipe, made: Array) -> Iterator[Recipe]:
    """Recipes from the simplest on; all others count as less simple than these."""
    blank = Recipe(kind="zeros", shape=recipe.shape)
    yield blank
    inner = _inner(domain)
    bounds = [inner.high, inner.low, domain.tried.high, domain.tried.low]
    if not domain.is_float and recipe.kind != "constant":  # one index of these may break something alone
        bounds += [float(value) for value in np.unique(made)[:_FEW]]
    yield from (replace(blank, kind="constant", first=bound) for bound in dict.fromkeys(bounds))
    if domain.is_float:
        yield from (replace(blank, kind="spike", first=bound) for bound in dict.fromkeys(bounds))


@st.composite
def drawn_inputs(draw: DrawFn, domains: Sequence[InputDomain], samples: int) -> Drawn:
    """Inputs for a model: each made independently, or all of them from one sample of the data, changed."""
    profile = _below(draw, len(domains[0].shapes)) if domains else 0
    lengths: dict[str, int] = {}
    shapes = {domain.name: _shape(draw, domain, profile, lengths) for domain in domains}
    if samples and _below(draw, 4) == 3:  # a real input keeps the relation between its parts
        number = _below(draw, samples)
        return {domain.name: _sample(draw, domain, shapes[domain.name], number) for domain in domains}
    return {domain.name: _recipe(draw, domain, shapes[domain.name], samples) for domain in domains}


def _shape(draw: DrawFn, domain: InputDomain, profile: int, lengths: dict[str, int]) -> tuple[int, ...]:
    """A shape of the profile. Axes of one name are equally long: ``lengths`` stores the drawn lengths."""
    shape = []
    for axis in domain.shapes[profile]:
        if axis.name not in lengths:
            lengths[axis.name] = axis.least + _below(draw, axis.most - axis.least + 1)
        shape.append(min(max(lengths[axis.name], axis.least), axis.most))
    return tuple(shape)


def _recipe(draw: DrawFn, domain: InputDomain, shape: tuple[int, ...], samples: int) -> Recipe:
    kinds = _FLOATS if domain.is_float else _WHOLE
    kind = _of(draw, kinds if samples else kinds[:-1])
    if kind == "sample":
        return _sample(draw, domain, shape, _below(draw, samples))
    if kind in ("constant", "spike"):
        place = _bits(draw, _PLACES) if kind == "spike" else 0
        return Recipe(kind=kind, shape=shape, number=place, first=_value(draw, domain))
    if kind in ("uniform", "normal", "alternating"):
        span = _span(draw, domain)
        seed = 0 if kind == "alternating" else _bits(draw, _SEEDS)
        return Recipe(kind=kind, shape=shape, first=span.low, second=span.high, number=seed)
    return Recipe(kind=kind, shape=shape)


def _sample(draw: DrawFn, domain: InputDomain, shape: tuple[int, ...], number: int) -> Recipe:
    if not domain.is_float:
        return Recipe(kind="sample", shape=shape, number=number, first=1.0)
    shift = _of(draw, _SHIFTS) * (domain.known.high - domain.known.low)
    return Recipe(kind="sample", shape=shape, number=number, first=_of(draw, _GAINS), second=shift)


def _span(draw: DrawFn, domain: InputDomain) -> Span:
    """The known range, the range to try, or a range between two values of it."""
    choice = _below(draw, 4)
    if choice < 2:
        return (_inner(domain), domain.tried)[choice]
    return Span(*sorted((_value(draw, domain), _value(draw, domain))))


def _value(draw: DrawFn, domain: InputDomain) -> float:
    """A bound, or a value between the bounds, of the known range and then of the range to try."""
    span = _of(draw, (_inner(domain), domain.tried))
    choice = _below(draw, 4)
    if choice < 2:
        return (span.high, span.low)[choice]
    return float(span.low + (span.high - span.low) * _bits(draw, _LEVELS) / 2**_LEVELS)


def _inner(domain: InputDomain) -> Span:
    """The known range, limited to the range to try."""
    return Span(domain.tried.nearest(domain.known.low), domain.tried.nearest(domain.known.high))


def _of(draw: DrawFn, choices: Sequence[T]) -> T:
    return choices[_below(draw, len(choices))]


def _below(draw: DrawFn, count: int) -> int:
    """A number below ``count``."""
    return _bits(draw, (count - 1).bit_length()) % count


def _bits(draw: DrawFn, count: int) -> int:
    """A number of so many bits, the highest first."""
    number = 0
    for _ in range(count):
        number = 2 * number + draw(st.booleans())
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSearch:
    """The number of inputs tried, the smallest that broke something, and whether time ended before all were tried."""

    tried: int
    seconds: float
    smallest: Drawn | None
    late: bool


class _BrokenError(Exception):
    """An input that breaks something: the failure that Hypothesis shrinks."""


class _Late(BaseException):
    """The time is over and nothing was found. A BaseException, so that Hypothesis does not shrink it."""


def search_inputs(
    strategy: SearchStrategy[Drawn],
    attempt: Callable[[Drawn], InputResult | None],
    *,
    examples: int,
    seconds: float,
    seed_number: int,
    simpler: Callable[[Drawn], Iterable[Drawn]] = lambda _: (),
    clock: Callable[[], float] = time.monotonic,
) -> InputSearch:
    """Try up to ``examples`` drawn inputs for up to ``seconds``, and shrink the first that breaks something.

    ``attempt`` returns ``None`` for an invalid input. ``simpler`` offers simpler inputs in place of one that
    Hypothesis cannot shrink further. One seed gives the same inputs.
    """
    searcher = _InputSearcher(attempt, seconds, clock)

    @seed(seed_number)
    @settings(  # independent of Hypothesis' profiles, without its database and output
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
    @given(strategy)
    def try_input(drawn: Drawn) -> None:
        searcher.try_input(drawn)

    with suppress(_BrokenError, _Late, Unsatisfiable):
        try_input()
    searcher.simplify(simpler)
    return searcher.result()


class _InputSearcher:
    """Answers Hypothesis, and caches the answers."""

    def __init__(
        self, attempt: Callable[[Drawn], InputResult | None], seconds: float, clock: Callable[[], float]
    ) -> None:
        self._attempt, self._clock, self._seconds = attempt, clock, seconds
        self._started = clock()
        self._answers: dict[str, InputResult | None] = {}
        self._smallest: Drawn | None = None
        self._late = False

    def try_input(self, drawn: Drawn) -> None:
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
        plain = self._smallest
        while plain is not None:
            self._smallest, variants = plain, simpler(plain)
            answers = ((one, self._answers[repr(one)]) for one in variants if self._is_known(one))
            plain = next((one for one, answer in answers if answer is not None and answer.broken), None)

    def _is_known(self, drawn: Drawn) -> bool:
        """Whether the input was tried, now or before; once the time is over no new one is."""
        key = repr(drawn)
        if key not in self._answers:
            if self._clock() >= self._started + self._seconds:
                self._late = True
                return False
            self._answers[key] = self._attempt(drawn)
        return True

    def result(self) -> InputSearch:
        return InputSearch(
            tried=sum(answer is not None for answer in self._answers.values()),
            seconds=self._clock() - self._started,
            smallest=self._smallest,
            late=self._late,
        )
