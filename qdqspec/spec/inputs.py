"""The section ``inputs``: shapes and data."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.spec.data import ShortData
from qdqspec.spec.fields import Count, Listed, Positive, SpecSection
from qdqspec.spec.place import SpecPath
from qdqspec.types import Inputs, InputShape, ShapeProfile


def _shape(value: object) -> object:
    """``[8, 3, 224, 224]`` is short for ``{opt: [8, 3, 224, 224]}``."""
    return {"opt": value} if isinstance(value, list | tuple) else value


Dims: TypeAlias = Annotated[Listed[Count], Field(max_length=32)]


class ShapeSection(SpecSection):
    """The shape of one input: the usual one, and its bounds where it is dynamic."""

    opt: Dims = Field(description="The shape that is measured.")
    min: Dims | None = Field(default=None, description="The smallest shape; as opt where not given.")
    max: Dims | None = Field(default=None, description="The largest shape; as opt where not given.")
    weight: Positive | None = Field(default=None, description="Share of this profile in the objective.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.min or self.opt, self.max or self.opt
        if not len(low) == len(self.opt) == len(high):
            raise PydanticCustomError("shape", "min, opt and max have different numbers of dimensions")
        if any(not a <= b <= c for a, b, c in zip(low, self.opt, high, strict=True)):
            raise PydanticCustomError("shape", "not min <= opt <= max in every dimension")
        return self

    def record(self) -> InputShape:
        """The three shapes as a record; missing bounds equal ``opt``."""
        return InputShape(min=self.min or self.opt, opt=self.opt, max=self.max or self.opt)


ShortShape: TypeAlias = Annotated[
    ShapeSection, BeforeValidator(_shape, json_schema_input_type=Dims | ShapeSection)
]


def _one_weight(profile: dict[str, ShapeSection]) -> dict[str, ShapeSection]:
    if not profile:
        raise PydanticCustomError("shape", "a shape profile without an input")
    if len({shape.weight for shape in profile.values() if shape.weight is not None}) > 1:
        raise PydanticCustomError("shape", "the inputs of one profile have different weights")
    return profile


Profile: TypeAlias = Annotated[dict[str, ShortShape], AfterValidator(_one_weight)]


def _profiles(value: object) -> object:
    """Accept one profile without a list around it."""
    return [value] if isinstance(value, Mapping) else value


Profiles: TypeAlias = Annotated[
    Listed[Profile], BeforeValidator(_profiles, json_schema_input_type=Profile | tuple[Profile, ...])
]


def _value(given: object) -> object:
    """Numbers and truth values, or rows of them of equal length."""
    if isinstance(given, bool | int):
        return given
    if isinstance(given, float):
        if isfinite(given):
            return given
        raise PydanticCustomError("value", "a value that is not finite")
    if not isinstance(given, list | tuple):
        raise PydanticCustomError("value", "a value is a number, true or false, or a list of them")
    rows = tuple(_value(row) for row in given)
    if len({len(row) if isinstance(row, tuple) else None for row in rows}) > 1:
        raise PydanticCustomError("value", "the rows of a value are not equally long")
    return rows


InputValue: TypeAlias = Annotated[
    Any,
    BeforeValidator(_value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "array"}]}),
]


class InputsSection(SpecSection):
    """Shapes and data the model is run with."""

    shapes: Profiles = Field(
        default=(), description="Shape by input name, or a list of such tables (profiles)."
    )
    values: dict[str, InputValue] = Field(
        default={},
        description="Inputs fixed to a value, by name. The tuned model does not have them: what follows from them is "
        "folded, and of an If on them the branch that is taken remains.",
    )
    calibration: ShortData | None = Field(
        default=None,
        description="Data to take activation ranges from: an .npz with one array per input, first axis samples, or an "
        ".npy; a folder or a glob of them; or a table for images, Python loaders, other names and labels apart.",
    )
    scales: SpecPath | None = Field(
        default=None,
        description="Ranges of activations that are known already: a calibration cache of a runtime, or JSON with "
        "{tensor: 6.0} or {tensor: [-1.5, 6.0]}. Activations without one stay in floating point.",
    )
    evaluation: ShortData | None = Field(
        default=None, description="The same with labels, to compare outputs and measure accuracy on."
    )

    @model_validator(mode="after")
    def _shape_or_value(self) -> Self:
        for name in self.values:
            if any(name in profile for profile in self.shapes):
                raise PydanticCustomError(
                    "value", "'{name}' has a value, and so no shape to be declared", {"name": name}
                )
        return self

    def rules(self) -> Inputs:
        """The section as a frozen record; no shapes is one profile without shapes."""
        profiles = tuple(_profile_record(profile) for profile in self.shapes)
        return Inputs(
            profiles=profiles or (ShapeProfile(),),
            values=self.values,
            calibration=None if self.calibration is None else self.calibration.source(),
            scales=self.scales,
            evaluation=None if self.evaluation is None else self.evaluation.source(),
        )


def _profile_record(profile: dict[str, ShapeSection]) -> ShapeProfile:
    weights = [shape.weight for shape in profile.values() if shape.weight is not None]
    shapes = {name: shape.record() for name, shape in profile.items()}
    return ShapeProfile(shapes=shapes, weight=weights[0] if weights else 1.0)
