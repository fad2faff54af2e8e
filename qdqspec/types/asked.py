"""What is asked: a case, with every rule its spec gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from qdqspec.types.words import Severity

# A task metric of the caller's own: outputs by name, then labels, all samples at once; gives a number, higher is
# better. An output whose first axis does not count samples is an array of arrays, one for each feed.
Metric: TypeAlias = Callable[[Mapping[str, Any], Any], float]

FixedValue: TypeAlias = bool | int | float | tuple[Any, ...]  # a number, or nested rows of them

SLACK = 1e-9  # by which a metric may miss its limit
DEFAULT_MIN_SQNR_DB = 20.0  # below it outputs change visibly: at 13 dB most texts of a text recognizer do
# Changes of ranges, weights and biases that reduce the error of a placement and cost no time, in the order of use.
CORRECTIONS = ("ranges", "equalization", "bits", "rounding", "bias")
TRIALS = {"quick": 12, "default": 40, "extensive": 120}  # search builds a preset allows


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """The smallest, usual and largest shape of one model input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """One shape for each named input. ``weight`` is its share in the objective."""

    shapes: Mapping[str, InputShape] = field(default_factory=dict)
    weight: float = 1.0

    def opt(self) -> dict[str, tuple[int, ...]]:
        """The shapes that are measured, by input name."""
        return {name: shape.opt for name, shape in self.shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Shapes and data of a case. Paths are absolute. ``values`` are inputs fixed to a value.

    ``scales`` names a calibration cache, or JSON with a range a tensor: what it says is not looked for in data.
    """

    profiles: tuple[ShapeProfile, ...] = (ShapeProfile(),)
    values: Mapping[str, FixedValue] = field(default_factory=dict)
    batch: int | None = None  # from the matrix: replaces the first dimension of every input
    calibration: Path | None = None
    scales: Path | None = None
    evaluation: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRules:
    """What may be quantized. Empty ``allow`` allows all; ``exclude`` are globs over node names."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRules:
    """How the model is cut into regions. ``manual`` lists node-name globs, one tuple a region.

    ``graph`` is layer information of an engine, which tells ``fusion`` what runs as one kernel.
    """

    by: Literal["structure", "names", "fusion", "manual"] = "structure"
    max_nodes: int = 10
    manual: tuple[tuple[str, ...], ...] = ()
    graph: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRules:
    """Number formats and calibration. ``activations="auto"`` lets the backend choose the dtype.

    ``format`` is one format, or several between which the search may choose block by block: ``int8+int4``.

    ``outputs`` says whether graph outputs may be quantized where a quantized operator makes them; with ``auto``, where
    a weighted operator makes one that the backend cannot run in integers otherwise.

    ``corrections`` are those of `CORRECTIONS` that may be applied; ``auto`` is all of them, ``none`` is none.
    """

    format: str = "int8"
    calibration: Literal["max", "percentile", "entropy", "mse", "mean"] = "max"
    weights: Literal["per-channel", "per-tensor"] = "per-channel"
    activations: str = "auto"
    outputs: bool | Literal["auto"] = "auto"
    corrections: Literal["auto", "none"] | tuple[str, ...] = "auto"

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats one by one, in the order given."""
        return tuple(self.format.split("+"))

    @property
    def allowed_corrections(self) -> tuple[str, ...]:
        """The corrections that may be applied, in the order in which they are."""
        if self.corrections in ("auto", "none"):
            return CORRECTIONS if self.corrections == "auto" else ()
        return tuple(name for name in CORRECTIONS if name in self.corrections)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRules:
    """What a task metric on the evaluation data must keep: a smallest value, a largest loss, or both.

    Both are in the metric's own unit; ``output`` names what is scored, the first output where it is ``None``.
    """

    metric: str = "top1"
    min: float | None = None
    max_drop: float | None = None
    output: str | None = None

    @property
    def key(self) -> str:
        """What it is called in evidence: ``top1``, or ``top1:logits``."""
        return self.metric if self.output is None else f"{self.metric}:{self.output}"

    def least(self, reference: float) -> float:
        """The smallest value that is good enough, given the reference's.

        A hair below what was asked: 0.97 - 0.96 is more than 0.01 in binary fractions.
        """
        floors = [self.min, None if self.max_drop is None else reference - self.max_drop]
        return max(floor for floor in floors if floor is not None) - SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What a selected model meets: the SQNR of its worst output, and the share of time that it is proved to save.

    ``source`` is where the SQNR limit comes from: the ``default``, as ``given``, lifted by ``none``, or absent as a
    task ``metric`` is the constraint.
    """

    min_sqnr_db: float | None = DEFAULT_MIN_SQNR_DB
    source: Literal["default", "given", "none", "metric"] = "default"
    min_gain: float = 0.02

    @property
    def marked_db(self) -> float | None:
        """The SQNR below which tables mark a model: the limit; the default where that was lifted."""
        return DEFAULT_MIN_SQNR_DB if self.source == "none" else self.min_sqnr_db


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRules:
    """The search: strategy, budget (whichever is reached first), objective, constraints and gating clock.

    Without ``min_sqnr_db`` and ``accuracy``, `DEFAULT_MIN_SQNR_DB` holds; ``"none"`` lifts that limit. What is selected
    is proved to take less than ``1 - min_gain`` of the reference's time.
    """

    strategy: str = "attribution"
    preset: Literal["quick", "default", "extensive"] = "default"
    trials: int | None = None
    minutes: float | None = None
    objective: Literal["latency", "pareto"] = "latency"
    min_sqnr_db: float | Literal["none"] | None = None
    accuracy: AccuracyRules | None = None
    min_gain: float = 0.02
    clock: Literal["auto", "cpu", "wall"] = "auto"
    float16: bool | None = None  # whether the model in float16 is timed beside it; else as the backend has it
    start_from: tuple[Path, ...] = ()

    @property
    def limits(self) -> SearchLimits:
        """The constraints in force."""
        asked = self.min_sqnr_db
        if asked is not None and asked != "none":
            return SearchLimits(min_sqnr_db=asked, source="given", min_gain=self.min_gain)
        if self.accuracy is not None:
            return SearchLimits(min_sqnr_db=None, source="metric", min_gain=self.min_gain)
        if asked == "none":
            return SearchLimits(min_sqnr_db=None, source="none", min_gain=self.min_gain)
        return SearchLimits(min_sqnr_db=DEFAULT_MIN_SQNR_DB, source="default", min_gain=self.min_gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """One check as asked: ``params`` is the check's own validated model, ``line`` its place in the file."""

    id: str
    kind: str
    params: Any
    severity: Severity = "error"
    line: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRules:
    """The closed words ``skip``, ``skip_unless`` and ``xfail``."""

    skip: str | None = None
    unless: Mapping[str, str] = field(default_factory=dict)
    xfail: str | None = None
    xfail_strict: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model under one choice of the matrix, with everything asked of it. Paths are absolute.

    ``metrics`` are task metrics that the caller brings, by the name that a spec gives them.
    """

    id: str
    model: Path
    spec: Path | None = None
    line: int = 1
    title: str = ""
    tags: tuple[str, ...] = ()
    matrix: Mapping[str, str | int | float] = field(default_factory=dict)
    inputs: Inputs = Inputs()
    patterns: PatternRules = PatternRules()
    regions: RegionRules = RegionRules()
    quantize: QuantizeRules = QuantizeRules()
    tune: TuneRules = TuneRules()
    checks: tuple[CheckSpec, ...] = ()
    skipping: SkipRules = SkipRules()
    metrics: Mapping[str, Metric] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spec_name(self) -> str:
        """The spec file's name without ``.qdq.yaml``; the model's stem where no spec stands behind."""
        if self.spec is None:
            return self.model.stem
        name = self.spec.name
        for suffix in (".qdq.yaml", ".qdq.yml", ".yaml", ".yml", ".py"):
            name = name.removesuffix(suffix)
        return name

    @property
    def name(self) -> str:
        """What tables show: ``squeezenet::default``."""
        return f"{self.spec_name}::{self.id}"
