"""The section ``matrix``: axes, and their combinations with ``exclude`` and ``include`` as in CI systems."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.spec.fields import Activations, Count, Formats, Listed, SpecSection, slug
from qdqspec.spec.kinds import BackendName, StrategyName
from qdqspec.types import Granularity, Method, Preset

# The record of a case, and its field, that each axis replaces; "" is the case itself. The order is that of the parts
# of an id, independent of the order in the file: a reordered matrix keeps its baselines.
AXES = {
    "quant": ("quantize", "format"),
    "batch": ("inputs", "batch"),
    "calibration": ("quantize", "calibration"),
    "weights": ("quantize", "weights"),
    "activations": ("quantize", "activations"),
    "strategy": ("tune", "strategy"),
    "preset": ("tune", "preset"),
    "backend": ("", "backend"),
}

MAX_CASES = 256  # of one spec
MAX_COMBINATIONS = 4096  # before exclude, so that expansion is fast

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
        if not chosen(self):
            raise PydanticCustomError("axis", "no axis is named here", {"known": tuple(AXES)})
        return self


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
        self.cases()
        return self

    def cases(self) -> dict[str, Choice]:
        """The values that each case chooses, by case id."""
        return named_combinations(
            combinations(chosen(self), [*map(chosen, self.exclude)], [*map(chosen, self.include)])
        )


Value: TypeAlias = str | int
Choice: TypeAlias = dict[str, Value]


def chosen(section: ChoiceSection | MatrixSection) -> dict[str, Any]:
    """The values given, in the order of the axes: one for each axis, or several in a matrix."""
    return {axis: getattr(section, axis) for axis in AXES if getattr(section, axis) is not None}


def combinations(
    axes: Mapping[str, Sequence[Value]],
    exclude: Sequence[Mapping[str, Value]] = (),
    include: Sequence[Mapping[str, Value]] = (),
) -> tuple[Choice, ...]:
    """All choices of one value per axis, without the excluded, with the included added.

    The rules are those of GitHub Actions: an entry of ``exclude`` removes all combinations that have all its
    values; an entry of ``include`` extends all combinations of the axes whose own values it does not change,
    and becomes a separate combination if there are none.

    Raises ``ValueError`` above `MAX_COMBINATIONS`, before ``exclude`` is applied.
    """
    if math.prod(len(values) for values in axes.values()) > MAX_COMBINATIONS:
        raise ValueError(f"the matrix has more than {MAX_COMBINATIONS:,} combinations before exclude")
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()) if axes)
    kept = (choice for choice in every if not any(entry.items() <= choice.items() for entry in exclude))
    originals = list(itertools.islice(kept, MAX_CASES + 1))
    extended = [dict(choice) for choice in originals]
    added: list[Choice] = []
    for entry in include:
        fits = False
        for choice, changed in zip(originals, extended, strict=True):
            if all(choice.get(axis, value) == value for axis, value in entry.items()):
                changed.update(entry)
                fits = True
        if not fits:
            added.append(dict(entry))
    return tuple({axis: choice[axis] for axis in AXES if axis in choice} for choice in (*extended, *added))


def named_combinations(choices: Sequence[Choice]) -> dict[str, Choice]:
    """The choices by case id. Raises ``ValueError`` if ids are not distinct."""
    if not choices:
        raise ValueError("the matrix excludes every case")
    if len(choices) > MAX_CASES:
        raise ValueError(f"the matrix gives more than {MAX_CASES} cases")
    named: dict[str, Choice] = {}
    for choice in choices:
        name = case_id(choice)
        if name in named:
            raise ValueError(f"two cases of the matrix are called '{name}'")
        named[name] = choice
    return named


def case_id(choice: Mapping[str, Value]) -> str:
    """``int8-b8``: words unchanged, numbers with the first letter of their axis."""
    return "-".join(
        f"{axis[0]}{value}" if isinstance(value, int) else slug(value) for axis, value in choice.items()
    )
