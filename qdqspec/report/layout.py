"""The layout of a written record: each class is one JSON object of `result.json` or of the run record.

Reading ignores unknown keys, so that records of a newer minor version stay readable; ``schema_version``
changes if an old reader would misinterpret a record. Numbers that JSON lacks are the strings ``"Infinity"``,
``"-Infinity"`` and ``"NaN"``: an output with an SQNR of ``"Infinity"`` is equal to the reference.
``parity.sqnr_db``, that of the whole model, is always a number: 200 if all outputs are equal. No absolute
path, user or host name is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from qdqspec.types import (
    AccuracyBound,
    AccuracyEvidence,
    BlockError,
    Clock,
    CommonPlacement,
    Consumer,
    CorrectionGain,
    DeviceKey,
    FrontPoint,
    GraphPart,
    Interval,
    Outcome,
    ProfileLatency,
    Provenance,
    Race,
    RegressionEvidence,
    RuntimeComparison,
    Samples,
    SearchLimits,
    Section,
    Severity,
    ShapeProfile,
    Status,
    TensorParity,
)

SCHEMA_VERSION: Final = 1


class RecordPart(BaseModel):
    """One JSON object."""

    model_config = ConfigDict(frozen=True, from_attributes=True, ser_json_inf_nan="strings")


class ModelPart(RecordPart):
    """The model's SHA-256, and its path relative to the spec, or its name if it is outside that folder."""

    sha256: str
    path: str


class SchemePart(RecordPart):
    """The digest of the placement: equal digests have Q/DQ at the same places."""

    digest: str


class TimedPart(RecordPart):
    """One role's samples, and their median on the gating clock."""

    median_ms: float
    samples: Samples


class OtherPart(TimedPart):
    """Another candidate of the final measurement: quantize-everything, or the runner-up."""

    role: str


class SpeedupPart(RecordPart):
    """Reference time over tuned time, with the bounds of its 95 % confidence interval."""

    median: float
    ci95: tuple[float, float]


class LatencyPart(RecordPart):
    """Conditions of the times above. ``ratios`` are times over the reference's, by role.

    With several shape ``profiles`` these and the times above are weighted geometric means; each profile's
    samples are among the role's ``samples``, in this order.
    """

    clock: Clock
    builds: int
    drift: float = 0.0
    ratios: Mapping[str, Interval]
    profiles: tuple[ProfileLatency, ...] = ()
    provenance: Provenance


class TrialPart(RecordPart):
    """One build of the search, without its placement and samples, which the journal keeps."""

    number: int
    phase: str
    status: Literal["ok", "failed"]
    error: str | None
    build_seconds: float
    ratio: float | None
    sqnr_db: float | None = None
    accuracy: float | None = None
    incumbent: bool
    race: Race | None


class TrialsPart(RecordPart):
    """The search's builds; ``list`` also has the rebuilds for noise and confirmation."""

    total: int
    built: int
    failed: int
    list: tuple[TrialPart, ...]


class SearchPart(RecordPart):
    """The search and its winner."""

    strategy: str
    seconds: float
    cpu_seconds: float
    float_runs: float | None = None
    eps: float
    blocks: int
    unchanged: bool
    reason: str
    ended_by: str = ""
    limits: SearchLimits = SearchLimits()
    corrections: tuple[CorrectionGain, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    accuracy: AccuracyBound | None = None
    errors: tuple[BlockError, ...] = ()
    errors_missing: str = ""
    provenance: Provenance


class CountPart(RecordPart):
    """A count."""

    count: int


class PairPart(RecordPart):
    """One Q/DQ pair, in names of the model without Q/DQ. ``consumers`` are (node, input) pairs."""

    tensor: str
    consumers: tuple[Consumer, ...]
    format: str
    axis: int | None
    weight: bool
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]


class ParityPart(RecordPart):
    """Parity of the worst output, of each output, and of quantization and the runtime separately."""

    sqnr_db: float
    cosine: float
    max_abs: float
    max_steps: float
    samples: int
    data: str
    outputs: tuple[TensorParity, ...]
    quantization: tuple[TensorParity, ...] = ()
    runtime: tuple[TensorParity, ...] = ()
    undivided: str = ""


class CheckPart(RecordPart):
    """The result of one check."""

    id: str
    kind: str
    severity: Severity
    verdict: Outcome
    headline: str
    numbers: Mapping[str, float]
    sections: tuple[Section, ...]
    advice: str


class CasePart(RecordPart):
    """``result.json``. Parts that were not measured are null. ``ops`` lists all nodes by op type, ``graph`` the
    model folded into a few parts with their times and errors.

    ``regression`` is the result for each entry of the committed baseline. ``reason`` explains ``status``.
    """

    schema_version: Literal[1]
    case: str
    status: Status = "tuned"
    reason: str = ""
    id: str
    spec: str | None
    title: str
    tags: tuple[str, ...]
    matrix: Mapping[str, str | int | float]
    backend: str
    target: str
    device: DeviceKey
    model: ModelPart
    scheme: SchemePart | None
    reference: TimedPart | None
    tuned: TimedPart | None
    others: tuple[OtherPart, ...]
    speedup: SpeedupPart | None
    latency: LatencyPart | None
    trials: TrialsPart | None
    search: SearchPart | None
    regions: CountPart | None
    patterns: CountPart | None
    placement: tuple[PairPart, ...]
    parity: ParityPart | None
    accuracy: Mapping[str, AccuracyEvidence]
    regression: Mapping[str, RegressionEvidence] = {}
    figures: Mapping[str, Mapping[str, float]] = {}
    size_bytes: Mapping[str, int]
    profiles: tuple[ShapeProfile, ...] = ()
    ops: Mapping[str, tuple[str, ...]]
    graph: tuple[GraphPart, ...] = ()
    checks: tuple[CheckPart, ...]
    warnings: tuple[str, ...]
    provenance: Provenance


class RunPart(RecordPart):
    """The run record: all cases of a run, and ``runtimes``: comparisons of cases that differ in the runtime only.

    ``common`` is one placement for all runtimes of such cases, if it was asked for.
    """

    schema_version: Literal[1]
    qdqspec: str
    started: str
    seconds: float
    cases: tuple[CasePart, ...]
    runtimes: tuple[RuntimeComparison, ...] = ()
    common: tuple[CommonPlacement, ...] = ()
