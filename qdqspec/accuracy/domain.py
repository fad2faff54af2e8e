"""The domain of a model's inputs, and inputs as recipes in it: a few numbers that define an array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Shape
from qdqspec._core.registry import did_you_mean
from qdqspec.accuracy.shapes import InputSpec, named_dims
from qdqspec.errors import SpecError
from qdqspec.graph.model import Model
from qdqspec.types import ShapeProfile


@dataclass(frozen=True, slots=True)
class Span:
    """All values from ``low`` to ``high``."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """The value, or the nearest bound."""
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRange:
    """One dimension: from ``least`` to ``most``. Axes of one ``name`` are equally long."""

    least: int
    most: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDomain:
    """One input: its ``shapes`` by profile, the range ``known`` from data, and the range to be ``tried``."""

    name: str
    dtype: np.dtype[np.generic]
    shapes: tuple[tuple[AxisRange, ...], ...]
    known: Span
    tried: Span

    @property
    def is_float(self) -> bool:
        """Whether it takes floating-point values, and not integers or truth values."""
        return bool(np.issubdtype(self.dtype, np.floating))


def input_domains(
    model: Model,
    specs: Mapping[str, InputSpec],
    profiles: Iterable[ShapeProfile],
    known: Mapping[str, Span],
    *,
    values: Mapping[str, Span],
    beyond: float,
) -> tuple[InputDomain, ...]:
    """The domain of each input: ``profiles`` give the shapes, ``known`` the ranges seen in data.

    ``values`` are the ranges allowed by a spec. Without one, integers, which may be indices, stay within the known
    range, and floats extend it ``beyond`` times. Raises `SpecError` for a name in ``values`` that is not an input.
    """
    if unknown := [name for name in values if name not in specs]:
        near = did_you_mean(unknown[0], [*specs])
        raise SpecError(
            f"`search.values` names '{unknown[0]}', which is no input of the model{near}",
            where=model.where,
            cure=f"its inputs: {', '.join(specs)}",
        )
    shaped, found = tuple(profiles), []
    for name, spec in specs.items():
        wide = known[name]
        if np.issubdtype(spec.dtype, np.floating):
            largest = float(np.finfo(spec.dtype).max)  # type: ignore[type-var]  # it is one of floats
            middle, half = (wide.low + wide.high) / 2, (wide.high - wide.low) / 2 * beyond
            wide = Span(max(middle - half, -largest), min(middle + half, largest))
        axes = (_axes(profile, name, spec.shape, named_dims(model, name)) for profile in shaped)
        tried = values.get(name) or wide
        found.append(
            InputDomain(name=name, dtype=spec.dtype, shapes=tuple(axes), known=known[name], tried=tried)
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


def _axes(
    profile: ShapeProfile, name: str, shape: Shape, dims: Sequence[int | str | None]
) -> tuple[AxisRange, ...]:
    """The axes of an input; those without a name are linked if they are declared with the same bounds."""
    declared = profile.shapes.get(name)
    bounds = (shape, shape) if declared is None else (declared.min, declared.max)
    names = dict(enumerate(dims))
    return tuple(
        AxisRange(
            least=low,
            most=high,
            name=own if isinstance(own := names.get(index), str) else f"{index} {low} {high}",
        )
        for index, (low, high) in enumerate(zip(*bounds, strict=True))
    )


RecipeKind: TypeAlias = Literal[
    "zeros", "constant", "denormal", "spike", "alternating", "uniform", "normal", "sample"
]

_PLACES = 16  # positions of a spike, as parts of the array


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The definition of one input. ``first``, ``second`` and ``number`` depend on the kind:

    constant and spike: the value ``first``, the spike in the ``number``-th of 16 parts; alternating:
    ``first`` and ``second`` in turn; uniform and normal: between ``first`` and ``second``, from seed
    ``number``; sample: data sample ``number`` times ``first`` plus ``second``.
    """

    kind: RecipeKind
    shape: tuple[int, ...]
    first: float = 0.0
    second: float = 0.0
    number: int = 0


def make(recipe: Recipe, domain: InputDomain, samples: Sequence[Array]) -> Array:
    """The array of a recipe. All values are in the range to try, or infinite as in the sample; integers are whole."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = _values(recipe, domain, samples)
        if not domain.is_float:
            values = np.rint(values)
        within = np.clip(values, domain.tried.low, domain.tried.high)
        if recipe.kind == "sample":
            sample = _sample_of(recipe, samples)
            within = np.where(np.isinf(sample), sample, within)
        return within.astype(domain.dtype)


def _sample_of(recipe: Recipe, samples: Sequence[Array]) -> npt.NDArray[np.float64]:
    return np.resize(samples[recipe.number % len(samples)], recipe.shape).astype(np.float64)


def words(recipe: Recipe, domain: InputDomain) -> str:
    """A description of the array for people."""

    def number(value: float) -> str:
        return f"{value:.5g}" if domain.is_float else f"{round(value)}"

    first, second = number(recipe.first), number(recipe.second)
    if recipe.kind == "sample":
        changed = domain.is_float and (recipe.first, recipe.second) != (1.0, 0.0)
        factors = f" times {recipe.first:g} plus {recipe.second:g}" if changed else ""
        return f"sample {recipe.number}{factors}"
    return {
        "zeros": "all zeros" if 0 in domain.tried else f"all {number(domain.tried.nearest(0))}",
        "constant": f"all {first}",
        "denormal": "all the smallest number above zero",
        "spike": f"one {first}, else zeros",
        "alternating": f"{first} and {second} in turn",
        "uniform": f"uniform from {first} to {second} (seed {recipe.number})",
        "normal": f"normal within {first} to {second} (seed {recipe.number})",
    }[recipe.kind]


def _values(recipe: Recipe, domain: InputDomain, samples: Sequence[Array]) -> npt.NDArray[np.float64]:
    shape, first, second = recipe.shape, recipe.first, recipe.second
    random = np.random.default_rng(recipe.number)
    if recipe.kind == "uniform":
        return random.uniform(min(first, second), max(first, second), shape)
    if recipe.kind == "normal":  # with the bounds three deviations from the middle
        return random.normal((first + second) / 2, abs(second - first) / 6, shape)
    if recipe.kind == "sample":
        sample = _sample_of(recipe, samples)
        return sample * first + second if domain.is_float else sample
    values = np.full(shape, first if recipe.kind == "constant" else 0.0)
    if recipe.kind == "denormal":
        values[...] = np.finfo(domain.dtype).smallest_subnormal  # type: ignore[type-var]  # of floats only
    if recipe.kind == "spike" and values.size:
        values.flat[values.size * recipe.number // _PLACES] = first
    if recipe.kind == "alternating":
        values.flat[::2], values.flat[1::2] = first, second
    return values


class InputResult(NamedTuple):
    """Messages of the limits that an input breaks, and its noise, which the search maximizes."""

    broken: tuple[str, ...]
    noise: float
