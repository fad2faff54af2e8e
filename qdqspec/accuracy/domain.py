"""The domain of a model's inputs: their shapes and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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

    @property
    def smallest(self) -> float:
        """The smallest number above zero of floating-point values."""
        return float(np.nextafter(np.zeros((), self.dtype), 1))


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


class InputResult(NamedTuple):
    """Messages of the limits that an input breaks, and its noise, which the search maximizes."""

    broken: tuple[str, ...]
    noise: float
