"""Inputs as recipes: a few numbers that define an array, so that a search can simplify them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array
from qdqspec.parity.domain import InputDomain

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
    """The array of a recipe. All values are in the range to try; integers are whole."""
    with np.errstate(over="ignore"):
        values = _values(recipe, domain, samples)
        if not domain.is_float:
            values = np.rint(values)
        return np.clip(values, domain.tried.low, domain.tried.high).astype(domain.dtype)


def words(recipe: Recipe, domain: InputDomain) -> str:
    """A description of the array for people."""
    first, second = (_number(value, domain) for value in (recipe.first, recipe.second))
    if recipe.kind == "sample":
        changed = domain.is_float and (recipe.first, recipe.second) != (1.0, 0.0)
        factors = f" times {recipe.first:g} plus {recipe.second:g}" if changed else ""
        return f"sample {recipe.number}{factors}"
    return {
        "zeros": "all zeros" if 0 in domain.tried else f"all {_number(domain.tried.nearest(0), domain)}",
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
        sample = np.resize(samples[recipe.number % len(samples)], shape).astype(np.float64)
        return sample * first + second if domain.is_float else sample
    values = np.full(shape, first if recipe.kind == "constant" else 0.0)
    if recipe.kind == "denormal":
        values[...] = np.finfo(domain.dtype).smallest_subnormal  # type: ignore[type-var]  # of floats only
    if recipe.kind == "spike" and values.size:
        values.flat[values.size * recipe.number // _PLACES] = first
    if recipe.kind == "alternating":
        values.flat[::2], values.flat[1::2] = first, second
    return values


def _number(value: float, domain: InputDomain) -> str:
    return f"{value:.5g}" if domain.is_float else f"{round(value)}"
