"""The section ``matrix``: axes, and their combinations with ``exclude`` and ``include`` as in CI systems."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.spec.fields import (
    AXES,
    MAX_CASES,
    MAX_COMBINATIONS,
    Activations,
    Count,
    Formats,
    Granularity,
    Listed,
    Method,
    Preset,
    SpecSection,
    slug,
)
from qdqspec.spec.kinds import BackendName, StrategyName

_T = TypeVar("_T")


def _distinct(values: tuple[_T, ...]) -> tuple[_T, ...]:
    if not values:
        raise PydanticCustomError("axis", "an axis without a value")
    for value, count in Counter(values).items():
        if count > 1:
            raise PydanticCustomError("axis", "'{value}' occurs twice on one axis", {"value": str(value)})
    return values


# Not min_length: pydantic counts valid items, so an invalid value would also be reported as an empty axis.
Axis: TypeAlias = Annotated[
    tuple[_T, ...], Field(strict=False, json_schema_extra={"minItems": 1}), AfterValidator(_distinct)
]


class ChoiceSection(SpecSection):
    """Values of some axes."""

    quant: Formats | None = None
    batch: Count | None = None
    calibration: Method | None = None
    weights: Granularity | None = None
    activations: Activations | None = None
    strategy: StrategyName | None = None
    preset: Preset | None = None
    backend: BackendName | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.choice():
            raise PydanticCustomError("axis", "no axis is named here", {"known": AXES})
        return self

    def choice(self) -> Choice:
        """The values given, in the order of the axes."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}


class MatrixSection(SpecSection):
    """One case for each combination of the axes' values; a value replaces the rule of its axis."""

    quant: Axis[Formats] | None = Field(
        default=None, description="Replaces quantize.format; a nested list is one case with several formats."
    )
    batch: Axis[Count] | None = Field(
        default=None, description="Replaces the first dimension of every input."
    )
    calibration: Axis[Method] | None = Field(default=None, description="Replaces quantize.calibration.")
    weights: Axis[Granularity] | None = Field(default=None, description="Replaces quantize.weights.")
    activations: Axis[Activations] | None = Field(default=None, description="Replaces quantize.activations.")
    strategy: Axis[StrategyName] | None = Field(default=None, description="Replaces tune.strategy.")
    preset: Axis[Preset] | None = Field(default=None, description="Replaces tune.preset.")
    backend: Axis[BackendName] | None = Field(
        default=None,
        description="The backend of the case, in place of that of the run; all are timed together.",
    )
    exclude: Listed[ChoiceSection] = Field(
        default=(), max_length=MAX_CASES, description="Combinations to exclude."
    )
    include: Listed[ChoiceSection] = Field(
        default=(), max_length=MAX_CASES, description="Values to add, or further combinations."
    )

    @model_validator(mode="after")
    def _can_be_named(self) -> Self:
        try:
            self.cases()
        except MatrixError as error:
            raise PydanticCustomError("matrix", "{reason}", {"reason": str(error)}) from None
        return self

    def cases(self) -> dict[str, Choice]:
        """The values that each case chooses, by case id."""
        axes = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        return named_combinations(
            combinations(axes, [e.choice() for e in self.exclude], [i.choice() for i in self.include])
        )


Value: TypeAlias = str | int
Choice: TypeAlias = dict[str, Value]


class MatrixError(ValueError):
    """A matrix gives no case, too many, or two with one name."""


def combinations(
    axes: Mapping[str, Sequence[Value]],
    exclude: Sequence[Mapping[str, Value]] = (),
    include: Sequence[Mapping[str, Value]] = (),
) -> tuple[Choice, ...]:
    """All choices of one value per axis, without the excluded, with the included added.

    The rules are those of GitHub Actions: an entry of ``exclude`` removes all combinations that have all its
    values; an entry of ``include`` extends all combinations of the axes whose own values it does not change,
    and becomes a separate combination if there are none.

    Raises `MatrixError` above `MAX_COMBINATIONS`, before ``exclude`` is applied.
    """
    if math.prod(len(values) for values in axes.values()) > MAX_COMBINATIONS:
        raise MatrixError(f"the matrix has more than {MAX_COMBINATIONS:,} combinations before exclude")
    originals = list(itertools.islice(_product(axes, exclude), MAX_CASES + 1))
    extended = [dict(choice) for choice in originals]
    added: list[Choice] = []
    for entry in include:
        fits = [n for n, choice in enumerate(originals) if _agrees(choice, entry)]
        for n in fits:
            extended[n].update(entry)
        if not fits:
            added.append(dict(entry))
    return tuple({axis: choice[axis] for axis in AXES if axis in choice} for choice in (*extended, *added))


def named_combinations(choices: Sequence[Choice]) -> dict[str, Choice]:
    """The choices by case id. Raises `MatrixError` if ids are not distinct."""
    if not choices:
        raise MatrixError("the matrix excludes every case")
    if len(choices) > MAX_CASES:
        raise MatrixError(f"the matrix gives more than {MAX_CASES} cases")
    named: dict[str, Choice] = {}
    for choice in choices:
        name = case_id(choice)
        if name in named:
            raise MatrixError(f"two cases of the matrix are called '{name}'")
        named[name] = choice
    return named


def case_id(choice: Mapping[str, Value]) -> str:
    """``int8-b8``: words unchanged, numbers with the first letter of their axis."""
    return "-".join(
        f"{axis[0]}{value}" if isinstance(value, int) else slug(value) for axis, value in choice.items()
    )


def _product(axes: Mapping[str, Sequence[Value]], exclude: Sequence[Mapping[str, Value]]) -> Iterator[Choice]:
    if not axes:
        return
    for values in itertools.product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        if not any(entry.items() <= choice.items() for entry in exclude):
            yield choice


def _agrees(choice: Mapping[str, Value], entry: Mapping[str, Value]) -> bool:
    return all(choice.get(axis, value) == value for axis, value in entry.items())
