"""The section ``matrix``: axes, ``exclude`` and ``include``."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.spec.fields import Count, Listed, SpecSection
from qdqspec.spec.formats import Formats
from qdqspec.spec.kinds import BackendName, StrategyName
from qdqspec.spec.matrix import Choice, MatrixError, combinations, named_combinations
from qdqspec.spec.vocabulary import AXES, MAX_CASES, Activations, Granularity, Method, Preset

_T = TypeVar("_T")


def _distinct(values: tuple[_T, ...]) -> tuple[_T, ...]:
    if not values:
        raise PydanticCustomError("axis", "an axis without a value")
    for value, count in Counter(values).items():
        if count > 1:
            raise PydanticCustomError("axis", "'{value}' stands twice on one axis", {"value": str(value)})
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
        default=None, description="Replaces quantize.format; a list inside is one case with several formats."
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
        description="The runtime of the case, in place of that of the run; all are timed together.",
    )
    exclude: Listed[ChoiceSection] = Field(
        default=(), max_length=MAX_CASES, description="Combinations to leave out."
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
