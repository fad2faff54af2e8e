"""The section ``inputs``: shapes, and data from files, images or a Python loader."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from qdqspec._core.records import record_of
from qdqspec.spec.fields import Count, DataPath, Listed, Positive, SpecPath, SpecSection, Words, short_form
from qdqspec.types import Data, DataSource, ImageRules, Inputs, InputShape, ShapeProfile

Dims: TypeAlias = Annotated[Listed[Count], Field(max_length=32)]


class ShapeSection(SpecSection):
    """The shape of one input: the usual one, and its bounds where it is dynamic."""

    opt: Dims = Field(description="The shape at which the model is timed.")
    min: Annotated[Listed[Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=32)] | None = Field(
        default=None, description="The smallest shape (default: opt); 0 for an axis that may be empty."
    )
    max: Dims | None = Field(default=None, description="The largest shape (default: opt).")
    weight: Positive | None = Field(default=None, description="Share of this profile in the objective.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.min or self.opt, self.max or self.opt
        if not len(low) == len(self.opt) == len(high):
            raise PydanticCustomError("shape", "min, opt and max have different numbers of dimensions")
        if any(not a <= b <= c for a, b, c in zip(low, self.opt, high, strict=True)):
            raise PydanticCustomError("shape", "not min <= opt <= max in every dimension")
        return self


ShortShape: TypeAlias = Annotated[
    ShapeSection, short_form((list, tuple), lambda shape: {"opt": shape}, Dims | ShapeSection)
]


def _one_weight(profile: dict[str, ShapeSection]) -> dict[str, ShapeSection]:
    if not profile:
        raise PydanticCustomError("shape", "a shape profile without an input")
    if len({shape.weight for shape in profile.values() if shape.weight is not None}) > 1:
        raise PydanticCustomError("shape", "the inputs of one profile have different weights")
    return profile


Profile: TypeAlias = Annotated[dict[str, ShortShape], AfterValidator(_one_weight)]


Profiles: TypeAlias = Annotated[
    Listed[Profile], short_form(Mapping, lambda profile: [profile], Profile | tuple[Profile, ...])
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
        description="Inputs fixed to a value, by name. The tuned model does not have them: nodes that depend only on "
        "them are folded, and an If on them is replaced by the branch that is taken.",
    )
    calibration: ShortData | None = Field(
        default=None,
        description="Data for the ranges of activations: an .npz with one array per input, first axis samples, or an "
        ".npy; a folder or a glob of them; or a table for images, Python loaders, other array names, or "
        "labels in a separate file.",
    )
    scales: SpecPath | None = Field(
        default=None,
        description="A file of known ranges of activations: a calibration cache of a runtime, or JSON with {tensor: "
        "6.0} or {tensor: [-1.5, 6.0]}. Activations without a range stay in floating point.",
    )
    evaluation: ShortData | None = Field(
        default=None,
        description="Data for parity and accuracy, in the same forms, with labels for task metrics.",
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
        profiles = []
        for profile in self.shapes:
            weights = [shape.weight for shape in profile.values() if shape.weight is not None]
            shapes = {
                name: InputShape(min=shape.min or shape.opt, opt=shape.opt, max=shape.max or shape.opt)
                for name, shape in profile.items()
            }
            profiles.append(ShapeProfile(shapes=shapes, weight=weights[0] if weights else 1.0))
        return Inputs(
            profiles=tuple(profiles) or (ShapeProfile(),),
            values=self.values,
            calibration=None if self.calibration is None else self.calibration.source(),
            scales=self.scales,
            evaluation=None if self.evaluation is None else self.evaluation.source(),
        )


Size: TypeAlias = Annotated[
    tuple[Count, Count],
    Field(strict=False),
    short_form(int, lambda side: (side, side), Count | tuple[Count, Count]),
]
# One number is short for a list of it, which is for all channels.
ChannelMeans: TypeAlias = Annotated[
    Listed[float], short_form((int, float), lambda one: (one,), float | tuple[float, ...])
]
ChannelDeviations: TypeAlias = Annotated[
    Listed[Positive], short_form((int, float), lambda one: (one,), Positive | tuple[Positive, ...])
]
_TRANSFORM = ("size", "resize", "scale", "mean", "std", "layout", "colors")


class DataSection(SpecSection):
    """Data of the model's inputs."""

    arrays: DataPath | None = Field(
        default=None,
        description="An .npz with one array per input, first axis samples, or an .npy; a folder or a glob of them.",
    )
    images: DataPath | None = Field(
        default=None, description="An image, a folder or a glob of them; for a model with one input."
    )
    loader: Words | None = Field(
        default=None,
        description="A Python data loader, by its name in fixture qdq_data or in group qdqspec.data.",
    )
    names: dict[str, Words] = Field(
        default={}, description="The array of each input whose name differs from it."
    )
    labels: SpecPath | None = Field(
        default=None, description="Labels in a separate file: .npy, .npz, or text with one number a line."
    )
    size: Size | None = Field(
        default=None, description="Of images: height and width, or one number for both."
    )
    resize: Count | None = Field(
        default=None,
        description="Of images: the shorter side before `size` is cut from the centre; by default the image just "
        "covers `size`.",
    )
    scale: float = Field(default=1 / 255, description="Of images: the factor of pixels, which are 0 to 255.")
    mean: ChannelMeans = Field(
        default=(0.0,), description="Of images: subtracted after `scale`; one number, or one a channel."
    )
    std: ChannelDeviations = Field(
        default=(1.0,), description="Of images: the divisor after `mean`; one number, or one a channel."
    )
    layout: Literal["nchw", "nhwc"] = Field(default="nchw", description="Of images: the order of dimensions.")
    colors: Literal["rgb", "bgr", "gray"] = Field(default="rgb", description="Of images: the channels.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [word for word in ("arrays", "images", "loader") if getattr(self, word) is not None]
        if len(given) != 1:
            raise PydanticCustomError("data", "one of arrays, images and loader is needed in a table of data")
        if self.images is None:
            if extra := [word for word in _TRANSFORM if word in self.model_fields_set]:
                raise PydanticCustomError("data", "'{word}' is a key of images", {"word": extra[0]})
            return self
        if self.size is None:
            raise PydanticCustomError("data", "images need a size, such as size: 224 or size: [480, 640]")
        channels = 1 if self.colors == "gray" else 3
        for word in ("mean", "std"):
            if len(getattr(self, word)) not in (1, channels):
                raise PydanticCustomError(
                    "data",
                    "'{word}' has one number, or one for each of {n} channels",
                    {"word": word, "n": channels},
                )
        if self.resize is not None and self.resize < max(self.size):
            raise PydanticCustomError("data", "'resize' is smaller than 'size', which is cut from it")
        if self.names:
            raise PydanticCustomError("data", "'names' is a key of arrays and loader")
        return self

    def source(self) -> DataSource:
        """A path if it says all, else a record."""
        path = self.arrays or self.images
        if path is not None and self.images is None and not self.names and self.labels is None:
            return path
        return Data(
            path=path,
            loader=self.loader or "",
            images=None if self.images is None else record_of(ImageRules, self),
            names=self.names,
            labels=self.labels,
        )


def _table(value: object) -> object:
    """A path is short for ``{arrays: path}``."""
    return value if isinstance(value, Mapping | DataSection) else {"arrays": value}


ShortData: TypeAlias = Annotated[
    DataSection, BeforeValidator(_table, json_schema_input_type=str | DataSection)
]
