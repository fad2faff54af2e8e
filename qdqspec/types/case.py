"""Records of a case: one model with all rules of its spec, and placements of Q/DQ pairs in the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

Method: TypeAlias = Literal["max", "percentile", "entropy", "mse", "mean"]  # of calibration
Granularity: TypeAlias = Literal["per-channel", "per-tensor"]  # of the scales of weights
RealType: TypeAlias = Literal["float32", "float16", "bfloat16"]
StartScales: TypeAlias = Literal["keep", "recalibrate"]  # of quantized models that a search starts from
RegionSource: TypeAlias = Literal["structure", "names", "fusion", "manual"]
Preset: TypeAlias = Literal["quick", "default", "extensive"]
Objective: TypeAlias = Literal["latency", "coverage", "pareto"]
ClockChoice: TypeAlias = Literal["auto", "cpu", "wall"]
Severity: TypeAlias = Literal["error", "warn"]
Kind: TypeAlias = Literal["fp", "in+out", "in-only", "dynamic", "weight-only", "activation-only"]
Label: TypeAlias = str  # a kind, prefixed with the format if it is not the case's first: "int4:in-only"
LABELS: tuple[Kind, ...] = ("fp", "in+out", "in-only", "dynamic")
HALVES: tuple[Kind, ...] = ("weight-only", "activation-only")  # few kernels use these; on request
# A task metric of the caller: outputs by name, then labels, all samples at once; returns a number, higher is
# better. An output whose first axis does not count samples is an array of arrays, one for each feed.
Metric: TypeAlias = Callable[[Mapping[str, Any], Any], float]
FixedValue: TypeAlias = bool | int | float | tuple[Any, ...]  # a number, or nested rows of them
SLACK = 1e-9  # tolerance of metric limits
DEFAULT_MIN_SQNR_DB = 20.0  # below it outputs change visibly: at 13 dB most texts of a text recognizer do
# Changes of ranges and weights that reduce the error of a placement at no cost in time, in the order of use.
CORRECTIONS = ("bits", "equalization", "bias", "ranges")
TRIALS = {"quick": 12, "default": 40, "extensive": 120}  # search builds a preset allows
TIMED_TRIALS = {"quick": 12, "default": 100, "extensive": 300}  # the same if a time limit is set


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """The smallest, usual and largest shape of one model input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Self:
        """An input of one shape."""
        return cls(min=shape, opt=shape, max=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """One shape for each named input. ``weight`` is its share in the objective."""

    shapes: Mapping[str, InputShape] = field(default_factory=dict)
    weight: float = 1.0

    def opt(self) -> dict[str, tuple[int, ...]]:
        """The shapes to measure, by input name."""
        return {name: shape.opt for name, shape in self.shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """The transform of an image to a sample: ``(pixels * scale - mean) / std`` after resizing.

    ``size`` is height and width. With ``resize`` the shorter side gets that length and ``size`` is cut from the
    centre; without it the image is scaled until it covers ``size``, then cut.
    """

    size: tuple[int, int]
    resize: int | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: Literal["nchw", "nhwc"] = "nchw"
    colors: Literal["rgb", "bgr", "gray"] = "rgb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Data that a path alone does not describe. Paths are absolute.

    ``path`` is a file, a folder or a glob; with ``images`` of images. ``loader`` names Python code that yields feeds.
    ``names`` maps inputs of the model to arrays of the data. ``labels`` is a file of labels beside the data.
    """

    path: Path | None = None
    loader: str = ""
    images: ImageRules | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    labels: Path | None = None

    @property
    def name(self) -> str:
        """A short name for messages."""
        return self.loader if self.path is None else self.path.name


DataSource: TypeAlias = Path | Data  # a path: of a file, a folder or a glob of .npz or .npy files
# Makes the feeds of a data loader: a mapping from input names (and ``labels``) to arrays for each sample.
Loader: TypeAlias = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Shapes and data of a case. Paths are absolute. ``values`` are inputs fixed to a value.

    ``scales`` names a calibration cache, or JSON with one range per tensor; these ranges are not calibrated
    from data.
    """

    profiles: tuple[ShapeProfile, ...] = (ShapeProfile(),)
    values: Mapping[str, FixedValue] = field(default_factory=dict)
    batch: int | None = None  # from the matrix: replaces the first dimension of every input
    calibration: DataSource | None = None
    scales: Path | None = None
    evaluation: DataSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRules:
    """Operators and nodes that may be quantized. Empty ``allow`` allows all; ``exclude`` are globs over node names."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRules:
    """The division of the model into regions. ``manual`` lists node-name globs, one tuple per region.

    ``graph`` is layer information of an engine, the source of the kernels for ``fusion``.
    """

    by: RegionSource = "structure"
    max_nodes: int = 10
    manual: tuple[tuple[str, ...], ...] = ()
    graph: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRules:
    """Number formats and calibration. ``activations="auto"`` lets the backend choose the dtype.

    ``format`` is one format, or several between which the search may choose block by block: ``int8+int4``.

    ``outputs`` is whether graph outputs that a quantized operator makes may be quantized; ``auto`` quantizes
    those of a weighted operator that the backend cannot run in integers otherwise.

    ``scales`` states whether scales of quantized models in ``start_from`` are kept. ``corrections`` are those of
    `CORRECTIONS` that may be applied; ``auto`` is all that are worth their time, ``none`` is none.

    ``labels`` are the kinds of labels that operators may have beside ``fp``; without any, all that the backend has.

    ``dq_dtype`` is the type that DequantizeLinear gives tensors whose type the model does not state, as after
    operators of plugins; without it these are not quantized.
    """

    format: str = "int8"
    calibration: Method = "max"
    weights: Granularity = "per-channel"
    activations: str = "auto"
    outputs: bool | Literal["auto"] = "auto"
    corrections: Literal["auto", "none"] | tuple[str, ...] = "auto"
    labels: tuple[Kind, ...] = ()
    scales: StartScales = "keep"
    dq_dtype: RealType | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats as a tuple, in the order given."""
        return tuple(self.format.split("+"))

    @property
    def allowed_corrections(self) -> tuple[str, ...]:
        """The corrections that may be applied, in the order of application."""
        if self.corrections in ("auto", "none"):
            return CORRECTIONS if self.corrections == "auto" else ()
        return tuple(name for name in CORRECTIONS if name in self.corrections)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRules:
    """The accuracy constraint on a task metric of the evaluation data: a minimum, a largest loss, or both.

    Both are in the metric's own unit; ``output`` names the output to score, the first one if ``None``.
    """

    metric: str = "top1"
    min: float | None = None
    max_drop: float | None = None
    output: str | None = None

    @property
    def key(self) -> str:
        """The metric's key in evidence: ``top1``, or ``top1:logits``."""
        return self.metric if self.output is None else f"{self.metric}:{self.output}"

    def least(self, reference: float) -> float:
        """The smallest acceptable value, given the reference's, less `SLACK`: 0.97 - 0.96 is above 0.01 in binary."""
        floors = [self.min, None if self.max_drop is None else reference - self.max_drop]
        return max(floor for floor in floors if floor is not None) - SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits for the selected model: the SQNR of its worst output, and the least significant saving of time.

    ``source`` is the origin of the SQNR limit: the ``default``, as ``given``, disabled by ``none``, or absent
    because a task ``metric`` is the constraint.
    """

    min_sqnr_db: float | None = DEFAULT_MIN_SQNR_DB
    source: Literal["default", "given", "none", "metric"] = "default"
    min_gain: float = 0.02

    @property
    def marked_db(self) -> float | None:
        """The SQNR below which tables mark a model: the limit; the default if it was disabled."""
        return DEFAULT_MIN_SQNR_DB if self.source == "none" else self.min_sqnr_db


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRules:
    """The search: strategy, budget (whichever is reached first), objective, constraints and gating clock.

    Without ``min_sqnr_db`` and ``accuracy``, `DEFAULT_MIN_SQNR_DB` applies; ``"none"`` disables that limit.
    The selected model takes significantly less than ``1 - min_gain`` of the reference's time. Without an ``objective``
    it is latency, or coverage if the backend has no clock.
    """

    strategy: str = "attribution"
    preset: Preset = "default"
    trials: int | None = None
    trials_per_region: int | None = None  # of strategy `region`
    region_models: bool = False  # of strategy `region`: the best model of each region is written
    validate_groups: bool = True  # by strategy `subgraph`, each step on the whole model
    minutes: float | None = None
    objective: Objective | None = None
    min_sqnr_db: float | Literal["none"] | None = None
    accuracy: AccuracyRules | None = None
    min_gain: float = 0.02
    clock: ClockChoice = "auto"
    # whether the model in float16 is timed as well; by default the backend decides
    float16: bool | None = None
    start_from: tuple[Path, ...] = ()

    @property
    def limits(self) -> SearchLimits:
        """The constraints in force."""
        asked, default = self.min_sqnr_db, SearchLimits(min_gain=self.min_gain)
        if asked is not None and asked != "none":
            return replace(default, min_sqnr_db=asked, source="given")
        if self.accuracy is not None:
            return replace(default, min_sqnr_db=None, source="metric")
        return default if asked is None else replace(default, min_sqnr_db=None, source="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """One check of a spec: ``params`` is the check's own validated model, ``line`` its position in the file."""

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


# of the files of specs; where several have one name, it is that of the first
SPEC_ENDINGS = (".qdq.yaml", ".qdq.yml", ".yaml", ".yml", ".py")


def name_of_spec(path: Path) -> str:
    """The name of a spec file without its ending."""
    return path.name.removesuffix(next(filter(path.name.endswith, SPEC_ENDINGS), ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model under one choice of the matrix, with all its rules. Paths are absolute.

    ``backend`` is the runtime that the matrix chooses; without one, that of the run.

    ``metrics`` are task metrics and ``loaders`` data loaders of the caller, by the name that a spec gives them.
    """

    id: str
    model: Path
    spec: Path | None = None
    line: int = 1
    title: str = ""
    tags: tuple[str, ...] = ()
    backend: str | None = None
    matrix: Mapping[str, str | int | float] = field(default_factory=dict)
    inputs: Inputs = Inputs()
    patterns: PatternRules = PatternRules()
    regions: RegionRules = RegionRules()
    quantize: QuantizeRules = QuantizeRules()
    tune: TuneRules = TuneRules()
    checks: tuple[CheckSpec, ...] = ()
    skipping: SkipRules = SkipRules()
    metrics: Mapping[str, Metric] = field(default_factory=dict, compare=False, repr=False)
    loaders: Mapping[str, Loader] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spec_name(self) -> str:
        """The spec file's name without its suffix ``.qdq.yaml``; the model's stem if there is no spec."""
        return self.model.stem if self.spec is None else name_of_spec(self.spec)

    @property
    def name(self) -> str:
        """The name in tables: ``squeezenet::default``."""
        return f"{self.spec_name}::{self.id}"


# ---- placements ----------------------------------------------------------------------------------

RegionType: TypeAlias = Literal["LEAF", "COMPOSITE", "ROOT"]


def label_of(number_format: str, kind: Kind) -> Label:
    """``int4:in-only``; the kind alone if the format is ``""``, the case's first."""
    return f"{number_format}:{kind}" if number_format and kind != "fp" else kind


def format_of(label: Label) -> str:
    """The format of a label; ``""`` for the case's first one, and for float."""
    return label.rpartition(":")[0]


def kind_of(label: Label) -> Kind:
    """The kind of a label. Raises ``ValueError`` if it is unknown."""
    kind = label.rpartition(":")[2]
    for known in (*LABELS, *HALVES):
        if kind == known:
            return known
    raise ValueError(f"unknown label {label!r}")


class Consumer(NamedTuple):
    """The end of an edge: input ``input`` of node ``node``; of no node (``""``), the graph output of that number.

    No node has an empty name: unnamed nodes are called ``OpType#n``.
    """

    node: str
    input: int

    @property
    def is_output(self) -> bool:
        """Whether this is a graph output."""
        return not self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One Q/DQ pair: a tensor, the consumers that read it quantized, and the number format.

    ``axis`` is set if scales are per channel (weights). ``weight`` marks a constant tensor. Tensor and node
    names are those of the model without Q/DQ. ``row`` is the site as a line of JSON.
    """

    tensor: str
    consumers: tuple[Consumer, ...]
    format: str
    axis: int | None = None
    weight: bool = False
    row: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = tuple(sorted(Consumer(*c) for c in self.consumers))
        row = json.dumps([self.tensor, [list(c) for c in ends], self.format, self.axis, self.weight])
        object.__setattr__(self, "consumers", ends)
        object.__setattr__(self, "row", row)

    def __hash__(self) -> int:
        """Hash of the row, which Python caches: placements hold tens of thousands of sites."""
        return hash(self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The Q/DQ pairs of a whole model. Equal sites are the same placement, whatever the labels.

    ``labels`` holds the label of each unit that is not in float, by the unit's id. ``given`` marks the pairs of a model
    that is a candidate as it was given, with its own numbers. ``digest`` has sixteen hex digits, stable over runs,
    machines and order of sites.
    """

    sites: frozenset[Site]
    labels: tuple[tuple[str, Label], ...] = field(default=(), compare=False)
    given: bool = False
    ordered: tuple[Site, ...] = field(default=(), init=False, repr=False, compare=False)  # canonical
    digest: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.sites, key=attrgetter("row")))
        rows = "\n".join([*(["given"] if self.given else ()), *(site.row for site in ordered)])
        object.__setattr__(self, "ordered", ordered)
        object.__setattr__(self, "digest", hashlib.sha256(rows.encode()).hexdigest()[:16])

    @classmethod
    def of_digest(cls, digest: str) -> Placement:
        """A placement of which only the digest is known, as in a record."""
        placement = cls(sites=frozenset())
        object.__setattr__(placement, "digest", digest)
        return placement

    @property
    def pairs(self) -> int:
        """Number of activation Q/DQ pairs; weight sites are not counted."""
        return sum(not site.weight for site in self.sites)


NO_PAIRS = Placement(sites=frozenset())  # of the float model, the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A set of nodes with a boundary. ``nodes`` are node names in graph order, all levels below included."""

    id: str
    type: RegionType
    parent: str | None
    children: tuple[str, ...]
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pattern: str  # digest of the canonical form, with a version prefix
    pattern_text: str = ""
