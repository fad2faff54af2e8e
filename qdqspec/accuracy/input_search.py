"""Searches for the smallest input that breaks limits, with Hypothesis: inputs are drawn, tried and shrunk.

All that is drawn is made of single bits. Hypothesis mixes constants of imported code into the integers and floats
that it draws, and stores those constants in a folder of the working directory. Bits avoid both, so that one
seed gives the same inputs everywhere. Every input is drawn from the same bits, whatever its kind, so that Hypothesis
can change the kind alone. It shrinks towards smaller bits: smaller shapes, the kinds in the order listed below, and
values seen in data.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings, strategies as st, target
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn, SearchStrategy

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.case_data import require_inputs
from qdqspec.accuracy.compare import typical_of
from qdqspec.accuracy.data import InputSpec
from qdqspec.accuracy.probes import InputResult, ModelPair, Prober, SavedProbe
from qdqspec.graph import Model
from qdqspec.types import InputShape, ParitySearch, ShapeProfile, TriedInput
from qdqspec.types.requests import InputRequest

T = TypeVar("T")

_FLOATS = ("zeros", "constant", "spike", "alternating", "uniform", "denormal", "sample", "sample")
_WHOLE = ("zeros", "constant", "uniform", "sample")
_LEVELS = 6  # bits of a value between two bounds
_SEEDS = 8  # bits
_PLACES = 16  # positions of a spike, as parts of the array
_GAINS = (1.0, 0.5, 2.0, 0.25, 1.5, 0.0625, -1.0, 4.0)  # factors of samples
_SHIFTS = (0.0, 0.125, -0.125, 0.5)  # offsets of samples, in widths of the known range


@dataclass(frozen=True, slots=True)
class Span:
    """All values from ``low`` to ``high``."""

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """The value, or the nearest bound."""
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDomain:
    """One input: its ``shapes`` by profile, the range ``known`` from data, and the range to be ``tried``.

    Axes of one name in ``axes`` are equally long.
    """

    name: str
    dtype: np.dtype[np.generic]
    shapes: tuple[InputShape, ...]
    axes: tuple[int | str | None, ...]
    known: Span
    tried: Span


def input_domains(
    model: Model,
    specs: Mapping[str, InputSpec],
    profiles: Sequence[ShapeProfile],
    feeds: Iterable[Feed],
    request: InputRequest,
) -> tuple[InputDomain, ...]:
    """The domain of each input: ``profiles`` give the shapes, data in ``feeds`` the known ranges.

    Where the request allows no range, integers, which may be indices, stay within the known range, and floats extend it
    by its factor ``beyond``. Raises `SpecError` if the request names an input that the model does not have.
    """
    known = spans_of(feeds)
    require_inputs(model, request.values, "`search.values`")
    found = []
    for name, spec in specs.items():
        wide = known[name]
        if np.issubdtype(spec.dtype, np.floating):
            largest = float(np.finfo(spec.dtype).max)  # type: ignore[type-var]  # it is one of floats
            middle, half = (wide.low + wide.high) / 2, (wide.high - wide.low) / 2 * request.beyond
            wide = Span(max(middle - half, -largest), min(middle + half, largest))
        found.append(
            InputDomain(
                name=name,
                dtype=spec.dtype,
                shapes=tuple(each.shapes.get(name) or InputShape.of(spec.shape) for each in profiles),
                axes=model.named_dims(name) or (None,) * len(spec.shape),
                known=known[name],
                tried=Span(*request.values[name]) if name in request.values else wide,
            )
        )
    return tuple(found)


def spans_of(feeds: Iterable[Mapping[str, Array]]) -> dict[str, Span]:
    """The smallest and the largest finite value of each input in all feeds; zero twice if an input has none."""
    found: dict[str, Span] = {}
    for feed in feeds:
        for name, array in feed.items():
            old = found.get(name, Span(math.inf, -math.inf))
            values = array[np.isfinite(array)]
            if values.size:
                low, high = float(values.min()), float(values.max())
                old = Span(min(old.low, low), max(old.high, high))
            found[name] = old
    return {name: span if span.low <= span.high else Span(0.0, 0.0) for name, span in found.items()}


class DrawnInput(NamedTuple):
    """The values of one input, a description of them, and all bits that were drawn until then."""

    values: Array
    words: str
    bits: tuple[bool, ...]


Drawn: TypeAlias = dict[str, DrawnInput]  # by input
Bit: TypeAlias = Callable[[], bool]


@st.composite
def drawn_inputs(draw: DrawFn, domains: Sequence[InputDomain], samples: Sequence[Feed]) -> Drawn:
    """Inputs for a model: each of its own kind, or all of them from one sample of the data, maybe changed."""
    bits = list[bool]()

    def bit() -> bool:
        bits.append(draw(st.booleans()))
        return bits[-1]

    is_beyond = bit()  # the range to try, and changed samples; else the known range
    profile = _below(bit, len(domains[0].shapes)) if domains else 0
    # if the first is made of a sample, all are: a real input keeps the relation between its parts
    is_together = bit()
    number = 0  # of the sample, of noise, and of the place of a spike
    lengths: dict[object, int] = {}  # of axes of one name; without a name, of axes with the same bounds
    found: Drawn = {}
    for domain in domains:
        span, shape = domain.shapes[profile], list[int]()
        for axis, (dim, least, most) in enumerate(zip(domain.axes, span.min, span.max, strict=True)):
            key = dim if isinstance(dim, str) else (axis, least, most)
            if key not in lengths:
                lengths[key] = least + _below(bit, most - least + 1)
            shape.append(min(max(lengths[key], least), most))
        kinds = _FLOATS if np.issubdtype(domain.dtype, np.floating) else _WHOLE
        kind = _of(bit, [kind for kind in kinds if samples or kind != "sample"])
        kind = "sample" if found and is_together else kind
        own_number = _bits(bit, _SEEDS)
        number = number if found and is_together else own_number
        is_together = is_together and kind == "sample"
        own = [sample[domain.name] for sample in samples]
        values, words = _input(bit, domain, shape, kind, number, own, is_beyond=is_beyond)
        found[domain.name] = DrawnInput(values, words, tuple(bits))
    return found


@np.errstate(over="ignore", invalid="ignore")
def _input(
    bit: Bit,
    domain: InputDomain,
    shape: Sequence[int],
    kind: str,
    number: int,
    samples: Sequence[Array],
    *,
    is_beyond: bool,
) -> tuple[Array, str]:
    """One input of a kind, and its description. Values are in the range to try, or infinite as in the sample."""
    tried, is_float = domain.tried, np.issubdtype(domain.dtype, np.floating)
    known = Span(tried.nearest(domain.known.low), tried.nearest(domain.known.high))
    span = tried if is_beyond else known
    first, second = _value(bit, span, span.high, span.low), _value(bit, span, span.low, span.high)
    gain, shift = _of(bit, _GAINS), _of(bit, _SHIFTS)
    low, high = sorted((first, second))

    def text(value: float) -> str:
        return f"{value:.5g}" if is_float else f"{round(value)}"

    words, values = f"all {text(tried.nearest(0))}", np.zeros(shape)
    if kind == "constant":
        words, values = f"all {text(first)}", np.full(shape, first)
    elif kind == "spike":
        words = f"one {text(first)}, else zeros"
        if values.size:
            values.flat[values.size * (number % _PLACES) // _PLACES] = first
    elif kind == "alternating":
        words, values = f"{text(low)} and {text(high)} in turn", np.resize([low, high], shape)
    elif kind == "uniform":
        words = f"uniform from {text(low)} to {text(high)} (seed {number})"
        values = np.random.default_rng(number).uniform(low, high, shape)
    elif kind == "denormal":
        words = "all the smallest number above zero"
        values = np.full(shape, float(np.nextafter(np.zeros((), domain.dtype), 1)))
    elif kind == "sample":
        number %= len(samples)
        words, values = f"sample {number}", np.resize(samples[number], shape).astype(np.float64)
        if is_beyond and is_float and (gain, shift) != (1.0, 0.0):
            plus = shift * (domain.known.high - domain.known.low)
            words, values = f"{words} times {gain:g} plus {plus:g}", values * gain + plus
    within = np.clip(values if is_float else np.rint(values), tried.low, tried.high)
    within = np.where(np.isinf(values), values, within)  # as in masks
    return within.astype(domain.dtype), words


def _value(bit: Bit, span: Span, *bounds: float) -> float:
    """One of the bounds, or a value between them."""
    choice, level = _below(bit, 4), _bits(bit, _LEVELS)
    return bounds[choice] if choice < 2 else span.low + (span.high - span.low) * level / 2**_LEVELS


def _of(bit: Bit, choices: Sequence[T]) -> T:
    return choices[_below(bit, len(choices))]


def _below(bit: Bit, count: int) -> int:
    """A number below ``count``."""
    return _bits(bit, (count - 1).bit_length()) % count


def _bits(bit: Bit, count: int) -> int:
    """A number of so many bits, the highest first."""
    number = 0
    for _ in range(count):
        number = 2 * number + bit()
    return number


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
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ParitySearch, Drawn | None]:
    """Try up to ``examples`` drawn inputs for up to ``seconds``, and shrink the first that breaks something.

    ``attempt`` returns ``None`` for an invalid input. One seed gives the same inputs. Returned is also the smallest
    input that breaks something.
    """
    started, is_late = clock(), False
    answers: dict[tuple[object, ...], InputResult | None] = {}
    firsts: dict[tuple[object, ...], list[tuple[bool, ...]]] = {}
    smallest: Drawn | None = None

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
        nonlocal is_late, smallest
        content = b"".join(each.values.tobytes() for each in drawn.values())
        key = hashlib.sha256(content).digest(), *(each.values.shape for each in drawn.values())
        bits = [each.bits for each in drawn.values()]
        if key not in answers:
            if clock() >= started + seconds:
                is_late = True
                if smallest is None:
                    raise _Late
                return  # while shrinking, an untried input does not count
            answers[key], firsts[key] = attempt(drawn), bits
        answer = answers[key]
        # one drawn again by other bits does not count as an example; by the same ones, it is a repetition by Hypothesis
        if answer is None or not (firsts[key] == bits or answer.broken):
            reject()
        target(answer.noise, label="noise")
        if answer.broken:
            smallest = drawn  # Hypothesis ends with the smallest
            raise _BrokenError

    with suppress(_BrokenError, _Late, Unsatisfiable):
        try_input()
    tried = sum(answer is not None for answer in answers.values())
    missing = "" if tried else "the float model runs on none of the inputs"
    return ParitySearch(tried=tried, seconds=clock() - started, late=is_late, missing=missing), smallest


def search_input(
    models: ModelPair,
    request: InputRequest,
    domains: Sequence[InputDomain],
    starts: Sequence[Feed],
    *,
    seconds_left: Callable[[], float | None],
    seed_number: int,
) -> tuple[ParitySearch, SavedProbe | None]:
    """Search the domains for an input that breaks the limits of a request: the search, and the smallest such input.

    It starts from the samples ``starts``, which the float model runs first. Then the request and ``seconds_left`` limit
    its time. Raises `BackendError` if the float model does not run on a sample.
    """
    typical = typical_of(models.reference(start) for start in starts)
    prober = Prober(models, request.limits, typical)
    limits = request.seconds, seconds_left()
    search, smallest = search_inputs(
        drawn_inputs(domains, starts),
        lambda drawn: prober.attempt(_feeds(drawn)),
        examples=request.examples,
        seconds=min(limit for limit in limits if limit is not None),
        seed_number=seed_number,
    )
    search = replace(search, closest_db=prober.closest_db)
    if smallest is None:
        return search, None
    feeds = _feeds(smallest)
    inputs = tuple(
        TriedInput(
            name=domain.name,
            dtype=str(domain.dtype),
            shape=feeds[domain.name].shape,
            words=smallest[domain.name].words,
            low=bounds.low,
            high=bounds.high,
            known_low=domain.known.low,
            known_high=domain.known.high,
        )
        for domain, bounds in zip(domains, spans_of([feeds]).values(), strict=True)
    )
    return search, SavedProbe(feeds=feeds, limits=request.limits, typical=typical, inputs=inputs)


def _feeds(drawn: Drawn) -> dict[str, Array]:
    return {name: each.values for name, each in drawn.items()}
