"""Frozen records that cross rooms. Standard library only: everything imports this module.

A case is what was asked, a placement is where Q/DQ pairs stand, a trial is one built candidate,
evidence is all that was measured of a case, a verdict is what a check makes of it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

Label: TypeAlias = Literal["fp", "in+out", "in-only"]
Clock: TypeAlias = Literal["cpu", "wall"]
Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
Severity: TypeAlias = Literal["error", "warn"]
EvidenceKind: TypeAlias = Literal["latency", "parity", "accuracy", "placement", "size"]
RegionType: TypeAlias = Literal["LEAF", "COMPOSITE", "ROOT"]

LABELS: tuple[Label, ...] = ("fp", "in+out", "in-only")


# ---- what is asked ------------------------------------------------------------------------------


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
    """Shapes and data of a case. Paths are absolute."""

    profiles: tuple[ShapeProfile, ...] = (ShapeProfile(),)
    batch: int | None = None  # from the matrix: replaces the first dimension of every input
    calibration: Path | None = None
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
    """How the model is cut into regions. ``manual`` lists node-name globs, one tuple a region."""

    by: Literal["structure", "names", "fusion", "manual"] = "structure"
    max_nodes: int = 10
    manual: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRules:
    """Number formats and calibration. ``activations="auto"`` lets the backend choose the dtype."""

    format: str = "int8"
    calibration: Literal["max", "percentile", "entropy", "mse"] = "max"
    weights: Literal["per-channel", "per-tensor"] = "per-channel"
    activations: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRules:
    """The search: strategy, budget (whichever is reached first), objective and gating clock."""

    strategy: str = "attribution"
    preset: Literal["quick", "default", "extensive"] = "default"
    trials: int | None = None
    minutes: float | None = None
    objective: Literal["latency", "pareto"] = "latency"
    min_sqnr_db: float | None = None
    clock: Literal["auto", "cpu", "wall"] = "auto"
    start_from: tuple[Path, ...] = ()


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
    """One model under one choice of the matrix, with everything asked of it. Paths are absolute."""

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


# ---- where Q/DQ stands --------------------------------------------------------------------------


class Consumer(NamedTuple):
    """An edge's end: input ``input`` of node ``node``."""

    node: str
    input: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One Q/DQ pair: a tensor, the consumers that see it quantized, and the number format.

    ``axis`` is set where scales are per channel (weights). ``weight`` marks a constant tensor.
    Tensor and node names are those of the model without Q/DQ.
    """

    tensor: str
    consumers: tuple[Consumer, ...]
    format: str
    axis: int | None = None
    weight: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "consumers", tuple(sorted(Consumer(*c) for c in self.consumers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where Q/DQ pairs stand in a whole model. Equal sites are the same placement, whatever the labels.

    ``labels`` remembers which label each block was given, for strategies that think in blocks.
    """

    sites: frozenset[Site]
    labels: tuple[tuple[str, Label], ...] = field(default=(), compare=False)
    _digest: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = sorted(
            json.dumps([s.tensor, [list(c) for c in s.consumers], s.format, s.axis, s.weight])
            for s in self.sites
        )
        object.__setattr__(self, "_digest", hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16])

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return self._digest

    @property
    def pairs(self) -> int:
        """How many activation Q/DQ pairs it has; weight sites are not counted."""
        return sum(not site.weight for site in self.sites)


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


# ---- what was measured --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Milliseconds of single runs, on both clocks. ``cpu_ms`` is empty where it means nothing."""

    wall_ms: tuple[float, ...] = ()
    cpu_ms: tuple[float, ...] = ()

    def on(self, clock: Clock) -> tuple[float, ...]:
        """The samples of the clock asked for; wall time where thread CPU time was not taken."""
        return self.cpu_ms if clock == "cpu" and self.cpu_ms else self.wall_ms

    def median_ms(self, clock: Clock) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.on(clock))

    def __add__(self, other: Samples) -> Samples:
        return Samples(wall_ms=self.wall_ms + other.wall_ms, cpu_ms=self.cpu_ms + other.cpu_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One executed kernel: its time in milliseconds, and the ONNX nodes it stands for.

    ``boundary`` marks kernels that only convert (quantize, dequantize, reorder, transpose inserted by
    the runtime); they are charged to ``tensors``. ``integer`` is true where the kernel computes on
    integers.
    """

    name: str
    op_type: str
    milliseconds: float
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    boundary: bool = False
    integer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate with the bounds of its 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A challenger against the incumbent, in interleaved pairs. ``ratio`` is challenger over incumbent."""

    opponent: str
    ratio: float
    p_value: float
    pairs: int
    verdict: Literal["faster", "slower", "no difference", "same graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate: what it was, whether it built, and how it fared. A failure is data, not an exception."""

    number: int
    phase: str
    placement: Placement
    status: Literal["ok", "failed"] = "ok"
    error: str | None = None
    samples: Samples = Samples()
    build_seconds: float = 0.0
    graph_hash: str = ""
    layers: tuple[LayerTime, ...] = ()
    race: Race | None = None
    incumbent: bool = False  # true where it became the one to beat
    ratio: float | None = None  # median over the reference's, as first screened

    @property
    def ok(self) -> bool:
        """Whether it was built and timed."""
        return self.status == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKey:
    """What baselines and caches are keyed by (``key``), and what is only recorded (``details``)."""

    key: str
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a number came from, and how old it is in seconds."""

    source: Literal["measured", "cached", "replayed"] = "measured"
    age_seconds: float = 0.0

    def __str__(self) -> str:
        if self.source == "measured":
            return "measured"
        hours = self.age_seconds / 3600
        age = (
            f"{self.age_seconds / 60:.0f} min"
            if hours < 1
            else f"{hours:.0f} h"
            if hours < 48
            else f"{hours / 24:.0f} d"
        )
        return f"{self.source} ({age})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What the search came to. ``left_alone`` is true where nothing proved better than the reference."""

    winner: Placement
    trials: tuple[Trial, ...]
    left_alone: bool
    reason: str
    strategy: str
    seconds: float
    cpu_seconds: float
    eps: float
    blocks: int
    regions: int
    patterns: int
    provenance: Provenance = Provenance()

    @property
    def built(self) -> int:
        """Search builds that succeeded; confirmation and noise rebuilds are not counted."""
        return sum(t.ok for t in self.trials if t.phase not in ("confirm", "noise"))

    @property
    def failed(self) -> int:
        """Search builds that failed."""
        return sum(not t.ok for t in self.trials if t.phase not in ("confirm", "noise"))

    @property
    def total(self) -> int:
        """Search builds, failed ones too; confirmation and noise rebuilds are not counted."""
        return self.built + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is, for progress bars and heartbeat lines. ``best`` is the ratio to the reference."""

    case: str
    phase: str
    done: int
    total: int
    best: float | None = None
    kept: int = 0
    dropped: int = 0
    undecided: int = 0
    failed: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyEvidence:
    """Final interleaved measurement over fresh builds, by role.

    Roles: ``reference``, ``tuned``, and where they differ from these ``everything`` (all of it quantized)
    and ``runner-up``. ``ratios[role]`` is the role's time over the reference's, ``speedup`` the reference's
    over the tuned one's.
    """

    clock: Clock
    samples: Mapping[str, Samples]
    ratios: Mapping[str, Interval]
    speedup: Interval
    builds: int
    provenance: Provenance = Provenance()

    def median_ms(self, role: str) -> float:
        """The median of a role on the gating clock, in milliseconds."""
        return self.samples[role].median_ms(self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParity:
    """How close one output is to the reference's.

    ``sqnr_db`` is ten times the log of signal power over noise power (infinite where equal),
    ``max_abs`` the largest absolute difference, ``max_steps`` the same in steps of an 8-bit grid over
    the reference's range.
    """

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float
    max_steps: float
    compared: bool = True  # false where the output is not a float tensor and was compared for equality
    matches: bool = True
    note: str = ""  # why it could not be compared, or did not match


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityEvidence:
    """Parity of the tuned model with the reference, over ``samples`` inputs. The worst output leads."""

    outputs: tuple[TensorParity, ...]
    samples: int
    data: str  # "evaluation", "calibration" or "random"

    @property
    def sqnr_db(self) -> float:
        """The worst output's SQNR in dB."""
        return min((o.sqnr_db for o in self.outputs), default=float("inf"))

    @property
    def cosine(self) -> float:
        """The worst output's cosine similarity."""
        return min((o.cosine for o in self.outputs), default=1.0)

    @property
    def max_abs(self) -> float:
        """The worst output's largest absolute difference."""
        return max((o.max_abs for o in self.outputs), default=0.0)

    @property
    def max_steps(self) -> float:
        """The worst output's largest difference in quantization steps."""
        return max((o.max_steps for o in self.outputs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyEvidence:
    """A task metric of reference and tuned model on labelled data. Higher is better."""

    metric: str
    reference: float
    tuned: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPair:
    """A site as shipped, with its numbers. Per-channel scales are listed in channel order."""

    site: Site
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a case when its checks judge it. Parts nobody asked for are ``None``."""

    case: Case
    backend: str
    target: str  # backend and variant: onnxruntime-cpu
    device: DeviceKey
    model_sha256: str
    search: SearchResult | None = None
    pairs: tuple[PlacedPair, ...] = ()
    latency: LatencyEvidence | None = None
    parity: ParityEvidence | None = None
    accuracy: Mapping[str, AccuracyEvidence] = field(default_factory=dict)  # by metric
    size_bytes: Mapping[str, int] = field(default_factory=dict)  # "reference", "tuned"
    node_ops: Mapping[str, str] = field(default_factory=dict)  # op type of every node, without Q/DQ
    output: Path | None = None  # the folder of this case's files
    warnings: tuple[str, ...] = ()


# ---- what is made of it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled table of a verdict's body: ``rows`` under ``headers``, or free ``text``."""

    title: str
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check says. ``headline`` is complete in itself and shorter than 80 columns."""

    outcome: Outcome
    headline: str
    sections: tuple[Section, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""  # what to do next; empty where it passed


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A verdict with the check it belongs to."""

    id: str
    kind: str
    severity: Severity
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One case of a run: its evidence and what its checks said."""

    evidence: Evidence
    results: tuple[CheckResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, ready for any report. ``started`` is an ISO 8601 time in UTC."""

    version: str
    started: str
    seconds: float
    cases: tuple[CaseRecord, ...]
