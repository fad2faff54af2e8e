"""The other sections of a spec: patterns, regions, quantize, tune, and when to skip.

``rules()`` of each section returns the frozen record that the rest of the package uses. The defaults of both
are equal, and a test compares them.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qdqspec._core.options import duration
from qdqspec._core.records import record_of
from qdqspec.spec.fields import (
    Activations,
    Correction,
    Count,
    Formats,
    Fraction,
    LabelKind,
    Listed,
    MetricLimits,
    NamesFile,
    Positive,
    Reason,
    SpecPath,
    SpecSection,
    Words,
    short_form,
)
from qdqspec.spec.kinds import StrategyName, Target
from qdqspec.types import (
    AccuracyRules,
    ClockChoice,
    Granularity,
    Method,
    Objective,
    PatternRules,
    Preset,
    QuantizeRules,
    RealType,
    RegionRules,
    RegionSource,
    StartScales,
    TuneRules,
)

# ---- what may be quantized, and how -------------------------------------------------------------


class NodesSection(SpecSection):
    """Wildcards over node names."""

    include: Listed[Words] = Field(default=(), description="Only these nodes may be quantized.")
    exclude: Listed[Words] = Field(default=(), description="These nodes are never quantized.")


class PatternsSection(SpecSection):
    """Operators and nodes that may be quantized."""

    allow: Listed[Words] = Field(
        default=(),
        description="Pattern expressions that may be quantized; an empty list allows all. One that matches nothing is "
        "a warning; if none matches anything, it is an error.",
    )
    deny: Listed[Words] = Field(default=(), description="Pattern expressions that are never quantized.")
    nodes: NodesSection = Field(default=NodesSection(), description="Filters by node name.")
    allow_file: NamesFile | None = Field(
        default=None, description="A file of globs over node names to include, one a line."
    )
    deny_file: NamesFile | None = Field(
        default=None, description="A file of globs over node names to exclude, one a line."
    )

    def rules(self) -> PatternRules:
        """The section as a frozen record; the names of both files are added to those of ``nodes``."""
        return PatternRules(
            allow=self.allow,
            deny=self.deny,
            include=(*self.nodes.include, *(self.allow_file or ())),
            exclude=(*self.nodes.exclude, *(self.deny_file or ())),
        )


class RegionsSection(SpecSection):
    """The division of the model into regions."""

    by: RegionSource = Field(
        default="structure",
        description="Regions by graph structure, scope names of the exporter, fusions of the backend, or a list.",
    )
    max_nodes: Count = Field(default=10, description="Largest region, in nodes.")
    manual: Listed[Listed[Words]] = Field(
        default=(), description="For 'by: manual': globs over node names, one list a region."
    )
    graph: SpecPath | None = Field(
        default=None,
        description="For 'by: fusion': layer information exported by a tool of the runtime, in place of a build.",
    )

    @model_validator(mode="after")
    def _manual_with_list(self) -> Self:
        if (self.by == "manual") != bool(self.manual):
            raise PydanticCustomError("regions", "'by: manual' and a list 'manual' belong together")
        if not all(self.manual):
            raise PydanticCustomError("regions", "a manual region without a node")
        if self.graph is not None and self.by != "fusion":
            raise PydanticCustomError("regions", "'graph' belongs to 'by: fusion'")
        return self

    def rules(self) -> RegionRules:
        """The section as a frozen record."""
        return record_of(RegionRules, self)


def _corrections(value: object) -> object:
    """``auto``, ``none``, or a list of corrections; one error for anything else."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    known = get_args(Correction) if isinstance(value, list | tuple) else ("auto", "none")
    if not names:
        raise PydanticCustomError("corrections", "an empty list of corrections: write none")
    for name in names:
        if name not in known:
            context = {"name": str(name), "known": known}
            raise PydanticCustomError("corrections", "there is no correction '{name}'", context)
    if len({*names}) < len(names):
        raise PydanticCustomError("corrections", "a correction is in the list twice")
    return value if isinstance(value, str) else tuple(names)


CorrectionNames: TypeAlias = Annotated[
    Literal["auto", "none"] | tuple[Correction, ...],
    BeforeValidator(_corrections, json_schema_input_type=Literal["auto", "none"] | tuple[Correction, ...]),
]


class QuantizeSection(SpecSection):
    """Number formats and calibration."""

    format: Formats = Field(
        default="int8",
        description="Number format of weights and of activations, if it applies to them. From several the search "
        "chooses.",
    )
    calibration: Method = Field(
        default="max", description="The method that computes ranges from calibration data."
    )
    weights: Granularity = Field(
        default="per-channel",
        description="One scale for each channel of a weight, or one for the whole weight.",
    )
    activations: Activations = Field(
        default="auto", description="Format of activations; auto: the one that the backend declares."
    )
    outputs: bool | Literal["auto"] = Field(
        default="auto",
        description="Whether graph outputs may be quantized; auto: only if the weighted operator that makes an output "
        "cannot run in integers otherwise.",
    )
    labels: Listed[LabelKind] = Field(
        default=(),
        description="Labels that operators may have (default: all that the backend supports).",
    )

    corrections: CorrectionNames = Field(
        default="auto",
        description="Corrections of channels, ranges, weights and biases, which reduce the error and cost no time in "
        "the model; auto: those worth their time that reduce it on held-out calibration data.",
    )

    scales: StartScales = Field(
        default="keep",
        description="Whether the scales of Q/DQ models in tune.start_from, for example from training, are kept.",
    )
    dq_dtype: RealType | None = Field(
        default=None,
        description="Output type of DequantizeLinear if the model does not state the type, as after operators of "
        "plugins; without it such tensors are not quantized.",
    )

    def rules(self) -> QuantizeRules:
        """The section as a frozen record."""
        return record_of(QuantizeRules, self)


# ---- the search ---------------------------------------------------------------------------------


def _minutes(value: object) -> object:
    """A number of minutes, or ``90s``, ``10m``, ``1h``."""
    if not isinstance(value, str):
        return value
    try:
        return duration(value.replace(" ", "")) / 60
    except ValueError:
        raise PydanticCustomError(
            "duration", "'{text}' is not a duration such as 90s, 10m or 1h", {"text": value}
        ) from None


Minutes: TypeAlias = Annotated[Positive, BeforeValidator(_minutes, json_schema_input_type=Positive | str)]


def _sqnr_limit(value: object) -> object:
    """A number of decibels, or ``none``; one error for anything else."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if value == "none" or abs(number) <= sys.float_info.max:
        return value
    raise PydanticCustomError(
        "sqnr_limit", "'min_sqnr_db' should be a finite number or none, not {text}", {"text": str(value)}
    )


SqnrLimit: TypeAlias = Annotated[
    float | Literal["none"], BeforeValidator(_sqnr_limit, json_schema_input_type=float | Literal["none"])
]


class AccuracySection(SpecSection, MetricLimits):
    """The constraint on a task metric in the search."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.min is None and self.max_drop is None:
            raise PydanticCustomError(
                "accuracy", "no limit of the metric is given: add min, max_drop or both"
            )
        return self


class TuneSection(SpecSection):
    """The search: method, time, objective and limits."""

    strategy: StrategyName = Field(default="attribution", description="Search strategy.")
    preset: Preset = Field(default="default", description="The size of the search.")
    trials: Count | None = Field(default=None, description="Largest number of search builds.")
    trials_per_region: Count | None = Field(
        default=None, description="Largest number of builds for each region, with strategy region."
    )
    region_models: bool = Field(
        default=False,
        description="Whether strategy region writes the best model of each region to regions/.",
    )
    validate_groups: bool = Field(
        default=True,
        description="Whether strategy subgraph measures each step on the whole model, or adds all groups that won "
        "alone at once.",
    )
    minutes: Minutes | None = Field(
        default=None,
        description="Time limit of the search: minutes, or 90s, 10m, 1h. It includes corrections (no step begins "
        "after 15 % of it) and the builds that confirm the result, up to half of it. With one, the search tries "
        "more changes of its result before it ends by itself. A close result may "
        "take twice the time. On top come calibration, the reference's runs and waiting for other runs, the timing of "
        "the finalists where it takes longer than that (a model of 350 ms: a minute and a half), and the comparison "
        "of outputs on all data.",
    )
    objective: Objective | None = Field(
        default=None,
        description="latency (default): the fastest placement; pareto: also the front of latency and accuracy; "
        "coverage (default on backends without a clock): the placement with the most multiplications in narrow "
        "formats, built and not timed.",
    )
    min_sqnr_db: SqnrLimit | None = Field(
        default=None,
        description="Smallest SQNR of the selected model, in dB (default: 20 without accuracy); none: no limit.",
    )
    accuracy: AccuracySection | None = Field(
        default=None, description="Accuracy constraint inside the search, by a metric on inputs.evaluation."
    )
    min_gain: Annotated[Fraction, Field(ge=0, lt=1)] = Field(
        default=0.02,
        description="Share of the reference's time that the selected model is proved to save: 0.02 or 2%.",
    )
    clock: ClockChoice = Field(
        default="auto",
        description="The clock of comparisons; auto: thread CPU time with one thread, else wall time.",
    )
    float16: bool | None = Field(
        default=None,
        description="Whether the model is also timed in float16 (default: on backends that compute in float16).",
    )
    start_from: Listed[SpecPath] = Field(
        default=(), description="Pattern caches, journals, schemes and Q/DQ models to start from."
    )

    @model_validator(mode="after")
    def _of_its_strategy(self) -> Self:
        """Keys of one strategy are errors with another."""
        for key, is_given, strategy in (
            ("trials_per_region", self.trials_per_region is not None, "region"),
            ("region_models", self.region_models, "region"),
            ("validate_groups", not self.validate_groups, "subgraph"),
        ):
            if is_given and self.strategy != strategy:
                context = {"key": key, "strategy": strategy}
                raise PydanticCustomError("tune", "'{key}' belongs to 'strategy: {strategy}'", context)
        return self

    def rules(self) -> TuneRules:
        """The section as a frozen record."""
        accuracy = None if self.accuracy is None else record_of(AccuracyRules, self.accuracy)
        return record_of(TuneRules, self, accuracy=accuracy)


# ---- skip, skip_unless, xfail -------------------------------------------------------------------


def _comparison(value: object) -> str:
    text = str(value)
    if not isinstance(value, str) or not re.fullmatch(r"(>=|<=|==|>|<) ?\d{1,3}(\.\d{1,3})?", text):
        raise PydanticCustomError("comparison", "{text} is not a comparison such as '>=8.9'", {"text": text})
    return text


class SkipUnlessSection(SpecSection):
    """Requirements on the machine; on others the case is skipped."""

    backend: Target | None = Field(default=None, description="A backend, or one of its targets.")
    compute_capability: Annotated[str, BeforeValidator(_comparison, json_schema_input_type=str)] | None = (
        Field(default=None, description="Compute capability of the GPU, as a comparison: '>=8.9'.")
    )


class XfailSection(SpecSection):
    """The reason why the case is expected to fail."""

    reason: Reason = Field(description="The reason why it is expected to fail.")
    strict: bool = Field(default=True, description="Whether an unexpected pass is a failure.")


Xfail: TypeAlias = Annotated[
    XfailSection, short_form(str, lambda reason: {"reason": reason}, Words | XfailSection)
]


def rules_of(spec: SpecSection) -> dict[str, Any]:
    """The frozen records of the sections of a spec, by the names that a case has for them."""
    sections = ("inputs", "patterns", "regions", "quantize", "tune")
    return {name: getattr(spec, name).rules() for name in sections}
