"""Data of the section ``inputs``: a path, or a table with images, a Python loader, names of arrays, or labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.codec import record_of
from qdqspec.spec.fields import Count, Listed, SpecSection, Words
from qdqspec.spec.place import DataPath, SpecPath
from qdqspec.types import Data, DataSource, ImageRules

Size: TypeAlias = Annotated[
    tuple[Count, Count],
    BeforeValidator(
        lambda value: (
            (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value
        ),
        json_schema_input_type=Count | tuple[Count, Count],
    ),
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
        default=None, description="Labels in a file of their own: .npy, .npz, or text with one number a line."
    )
    size: Size | None = Field(
        default=None, description="Of images: height and width, or one number for both."
    )
    resize: Count | None = Field(
        default=None,
        description="Of images: the shorter side before `size` is cut out; by default `size` just fits.",
    )
    scale: float = Field(default=1 / 255, description="Of images: what pixels of 0 to 255 are multiplied by.")
    mean: Listed[float] = Field(
        default=(0.0,), description="Of images: subtracted after `scale`, one or a channel."
    )
    std: Listed[Annotated[float, Field(gt=0)]] = Field(
        default=(1.0,), description="Of images: what is divided by after `mean`, one or a channel."
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
