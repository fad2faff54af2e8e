"""The parts of a spec as pydantic models, one a top-level key. May import floor 0 and pydantic.

Each ``rules()`` gives the frozen record that the rest of the house works with; the defaults of both
are the same, and a test holds them together. Numbers are strict: text is no number, ``true`` no ``1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec.spec.kinds import Strategy, Target
from qdqspec.spec.matrix import Choice, MatrixError, combinations, named_combinations
from qdqspec.spec.place import NamesFile, SpecPath
from qdqspec.spec.vocabulary import AXES, Activations, Format, Granularity, Method, Preset
from qdqspec.types import (
    Inputs,
    InputShape,
    PatternRules,
    QuantizeRules,
    RegionRules,
    ShapeProfile,
    SkipRules,
    TuneRules,
)

_T = TypeVar("_T")

# A YAML list. Strictness concerns what is in it, not whether Python calls it a list or a tuple.
Listed: TypeAlias = Annotated[tuple[_T, ...], Field(strict=False)]


def _said(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "empty text where something must be said")
    return text


Words: TypeAlias = Annotated[str, AfterValidator(_said), Field(json_schema_extra={"minLength": 1})]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping of the spec. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# ---- inputs -------------------------------------------------------------------------------------


def _shape(value: object) -> object:
    """``[8, 3, 224, 224]`` is short for ``{opt: [8, 3, 224, 224]}``."""
    return {"opt": value} if isinstance(value, list | tuple) else value


Dims: TypeAlias = Annotated[Listed[Count], Field(max_length=32)]


class Shape(Section):
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
        """All three shapes."""
        return InputShape(min=self.min or self.opt, opt=self.opt, max=self.max or self.opt)


ShortShape: TypeAlias = Annotated[Shape, BeforeValidator(_shape, json_schema_input_type=Dims | Shape)]


def _one_weight(profile: dict[str, Shape]) -> dict[str, Shape]:
    if not profile:
        raise PydanticCustomError("shape", "a shape profile without an input")
    if len({shape.weight for shape in profile.values() if shape.weight is not None}) > 1:
        raise PydanticCustomError("shape", "the inputs of one profile have different weights")
    return profile


Profile: TypeAlias = Annotated[dict[str, ShortShape], AfterValidator(_one_weight)]


def _profiles(value: object) -> object:
    """One profile needs no list around it."""
    return [value] if isinstance(value, Mapping) else value


Profiles: TypeAlias = Annotated[
    Listed[Profile], BeforeValidator(_profiles, json_schema_input_type=Profile | tuple[Profile, ...])
]


class InputsSection(Section):
    """Shapes and data the model is run with."""

    shapes: Profiles = Field(
        default=(), description="Shape by input name, or a list of such tables (profiles)."
    )
    calibration: SpecPath | None = Field(
        default=None, description="An .npz with one array per input, first axis samples; or a folder of them."
    )
    evaluation: SpecPath | None = Field(
        default=None, description="An .npz with inputs and labels, for accuracy."
    )

    def rules(self) -> Inputs:
        """As a frozen record; no shapes is one profile without shapes."""
        profiles = tuple(_profile_record(profile) for profile in self.shapes)
        return Inputs(
            profiles=profiles or (ShapeProfile(),), calibration=self.calibration, evaluation=self.evaluation
        )


def _profile_record(profile: dict[str, Shape]) -> ShapeProfile:
    weights = [shape.weight for shape in profile.values() if shape.weight is not None]
    shapes = {name: shape.record() for name, shape in profile.items()}
    return ShapeProfile(shapes=shapes, weight=weights[0] if weights else 1.0)


# ---- what may be quantized, and how -------------------------------------------------------------


class NodesSection(Section):
    """Wildcards over node names."""

    include: Listed[Words] = Field(default=(), description="Only these nodes may be quantized.")
    exclude: Listed[Words] = Field(default=(), description="These nodes are never quantized.")


class PatternsSection(Section):
    """What may be quantized."""

    allow: Listed[Words] = Field(
        default=(), description="Pattern expressions that may be quantized; none allows all."
    )
    deny: Listed[Words] = Field(default=(), description="Pattern expressions that are never quantized.")
    nodes: NodesSection = Field(default=NodesSection(), description="The same by node name.")
    allow_file: NamesFile | None = Field(
        default=None, description="A file of node-name wildcards to include, one a line."
    )
    deny_file: NamesFile | None = Field(
        default=None, description="A file of node-name wildcards to exclude, one a line."
    )

    def rules(self) -> PatternRules:
        """As a frozen record; the names of both files stand with those of ``nodes``."""
        return PatternRules(
            allow=self.allow,
            deny=self.deny,
            include=(*self.nodes.include, *(self.allow_file or ())),
            exclude=(*self.nodes.exclude, *(self.deny_file or ())),
        )


class RegionsSection(Section):
    """How the model is cut into regions."""

    by: Literal["structure", "names", "fusion", "manual"] = Field(
        default="structure",
        description="By graph structure, exporter scope names, backend fusions, or the list given.",
    )
    max_nodes: Count = Field(default=10, description="Largest region, in nodes.")
    manual: Listed[Listed[Words]] = Field(
        default=(), description="For 'by: manual': node-name wildcards, one list a region."
    )

    @model_validator(mode="after")
    def _manual_with_list(self) -> Self:
        if (self.by == "manual") != bool(self.manual):
            raise PydanticCustomError("regions", "'by: manual' and a list 'manual' belong together")
        if not all(self.manual):
            raise PydanticCustomError("regions", "a manual region without a node")
        return self

    def rules(self) -> RegionRules:
        """As a frozen record."""
        return RegionRules(by=self.by, max_nodes=self.max_nodes, manual=self.manual)


class QuantizeSection(Section):
    """Number formats and calibration."""

    format: Format = Field(
        default="int8", description="Number format of weights and, where it may, of activations."
    )
    calibration: Method = Field(default="max", description="How ranges come from calibration data.")
    weights: Granularity = Field(default="per-channel", description="Scales of weights.")
    activations: Activations = Field(
        default="auto", description="Format of activations; auto asks the backend."
    )

    def rules(self) -> QuantizeRules:
        """As a frozen record."""
        return QuantizeRules(
            format=self.format,
            calibration=self.calibration,
            weights=self.weights,
            activations=self.activations,
        )


# ---- the search ---------------------------------------------------------------------------------

_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) ?([smh])")


def _minutes(value: object) -> object:
    """A number of minutes, or ``90s``, ``10m``, ``1h``."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise PydanticCustomError(
            "duration", "'{text}' is not a duration such as 90s, 10m or 1h", {"text": value}
        )
    return float(match[1]) * _MINUTES[match[2]]


Minutes: TypeAlias = Annotated[Positive, BeforeValidator(_minutes, json_schema_input_type=Positive | str)]


class TuneSection(Section):
    """The search: how, how long, for what."""

    strategy: Strategy = Field(default="attribution", description="Search strategy.")
    preset: Preset = Field(default="default", description="How thorough the search is.")
    trials: Count | None = Field(default=None, description="Search builds at most.")
    minutes: Minutes | None = Field(default=None, description="Time at most: minutes, or 90s, 10m, 1h.")
    objective: Literal["latency", "pareto"] = Field(
        default="latency", description="The fastest, or the front of latency and accuracy."
    )
    min_sqnr_db: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None, description="Accuracy constraint inside the search, in dB."
    )
    clock: Literal["auto", "cpu", "wall"] = Field(default="auto", description="The clock that decides.")
    start_from: Listed[SpecPath] = Field(
        default=(), description="Pattern caches and Q/DQ models to start from."
    )

    def rules(self) -> TuneRules:
        """As a frozen record."""
        return TuneRules(
            strategy=self.strategy,
            preset=self.preset,
            trials=self.trials,
            minutes=self.minutes,
            objective=self.objective,
            min_sqnr_db=self.min_sqnr_db,
            clock=self.clock,
            start_from=self.start_from,
        )


# ---- the matrix ---------------------------------------------------------------------------------


def _distinct(values: tuple[_T, ...]) -> tuple[_T, ...]:
    if not values:
        raise PydanticCustomError("axis", "an axis without a value")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise PydanticCustomError("axis", "'{value}' stands twice on one axis", {"value": str(value)})
    return values


# Not min_length: pydantic counts what is valid, so a wrong value would be an empty axis as well.
Axis: TypeAlias = Annotated[
    tuple[_T, ...], Field(strict=False, json_schema_extra={"minItems": 1}), AfterValidator(_distinct)
]


class ChoiceSection(Section):
    """Values of some axes."""

    quant: Format | None = None
    batch: Count | None = None
    calibration: Method | None = None
    weights: Granularity | None = None
    activations: Activations | None = None
    strategy: Strategy | None = None
    preset: Preset | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.choice():
            raise PydanticCustomError("axis", "no axis is named here", {"known": AXES})
        return self

    def choice(self) -> Choice:
        """The values given, in the order of the axes."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}


class MatrixSection(Section):
    """One case for each combination of the axes' values; a value replaces the rule of its axis."""

    quant: Axis[Format] | None = Field(default=None, description="Replaces quantize.format.")
    batch: Axis[Count] | None = Field(
        default=None, description="Replaces the first dimension of every input."
    )
    calibration: Axis[Method] | None = Field(default=None, description="Replaces quantize.calibration.")
    weights: Axis[Granularity] | None = Field(default=None, description="Replaces quantize.weights.")
    activations: Axis[Activations] | None = Field(default=None, description="Replaces quantize.activations.")
    strategy: Axis[Strategy] | None = Field(default=None, description="Replaces tune.strategy.")
    preset: Axis[Preset] | None = Field(default=None, description="Replaces tune.preset.")
    exclude: Listed[ChoiceSection] = Field(default=(), description="Combinations to leave out.")
    include: Listed[ChoiceSection] = Field(default=(), description="Values to add, or further combinations.")

    @model_validator(mode="after")
    def _can_be_named(self) -> Self:
        try:
            self.cases()
        except MatrixError as error:
            raise PydanticCustomError("matrix", "{reason}", {"reason": str(error)}) from None
        return self

    def cases(self) -> dict[str, Choice]:
        """What each case chooses, by case id."""
        axes = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        return named_combinations(
            combinations(axes, [e.choice() for e in self.exclude], [i.choice() for i in self.include])
        )


# ---- skip, skip_unless, xfail -------------------------------------------------------------------

_COMPARISON = re.compile(r"(>=|<=|==|>|<) ?\d{1,3}(\.\d{1,3})?")


def _comparison(value: object) -> str:
    text = str(value)
    if not isinstance(value, str) or _COMPARISON.fullmatch(text) is None:
        raise PydanticCustomError("comparison", "{text} is not a comparison such as '>=8.9'", {"text": text})
    return text


class SkipUnlessSection(Section):
    """What the machine must have; the case is skipped elsewhere."""

    backend: Target | None = Field(default=None, description="A backend or target, such as tensorrt.")
    compute_capability: Annotated[str, BeforeValidator(_comparison, json_schema_input_type=str)] | None = (
        Field(default=None, description="Of the GPU, as a comparison: '>=8.9'.")
    )

    def rules(self) -> dict[str, str]:
        """The conditions given."""
        return {name: value for name, value in self if value is not None}


def _reason(value: object) -> object:
    """A text is short for ``{reason: text}``."""
    return {"reason": value} if isinstance(value, str) else value


class XfailSection(Section):
    """Why the case is expected to fail."""

    reason: Words = Field(description="Why it is expected to fail.")
    strict: bool = Field(default=True, description="Whether an unexpected pass is a failure.")


Xfail: TypeAlias = Annotated[
    XfailSection, BeforeValidator(_reason, json_schema_input_type=Words | XfailSection)
]


def skip_rules(skip: str | None, unless: SkipUnlessSection | None, xfail: XfailSection | None) -> SkipRules:
    """The three keys as one frozen record."""
    return SkipRules(
        skip=skip,
        unless={} if unless is None else unless.rules(),
        xfail=None if xfail is None else xfail.reason,
        xfail_strict=True if xfail is None else xfail.strict,
    )
