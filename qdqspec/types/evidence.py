"""Records of the evidence that checks judge, of their verdicts and of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from qdqspec.types.case import Case, Severity, ShapeProfile, Site
from qdqspec.types.measurement import (
    Clock,
    CulpritEvidence,
    DeviceKey,
    Interval,
    LayerTime,
    ParityEvidence,
    ParitySearch,
    Provenance,
    RuntimeComparison,
    Samples,
)
from qdqspec.types.search import SearchResult

Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
Status: TypeAlias = Literal["tuned", "untimed", "unchanged", "skipped", "not run"]  # of a case
EvidenceKind: TypeAlias = Literal[
    "latency",
    "parity",
    "accuracy",
    "placement",
    "size",
    "survival",
    "regression",
    "lint",
    "builds",
    "figures",
]
LintTarget: TypeAlias = str  # a lint target that a backend declares, see `qdqspec._core.hooks`
FindingSeverity: TypeAlias = Literal["refused", "slow", "note"]
Optimizer: TypeAlias = str  # one of `OPTIMIZERS`, or one that a backend declares
OPTIMIZERS = ("constant-folding", "onnxslim", "onnxscript")  # that belong to no backend
BaselineState: TypeAlias = Literal["compared", "written", "missing", "unlike", "damaged", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """The change of a time, or a ratio of times, between two runs: the later over the earlier.

    ``builds`` is the 95 % interval over fresh builds, ``ranks`` are the bounds of a rank test over rounds with 1 %
    error on each side, and ``p_value`` is that of no change. ``reference`` is the change of the reference's time, if
    the change is that of a ratio to it.
    """

    builds: Interval
    ranks: Interval
    p_value: float
    reference: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFigure:
    """A present or past ratio tuned / reference of a baseline file.

    ``recorded`` is an ISO 8601 time in UTC; ``changed`` lists the differences to the figure it replaced.
    """

    device: str
    ratio: Interval
    recorded: str = ""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionEvidence:
    """The ratio tuned / reference of this run and that of the baseline in ``file``.

    ``file`` is relative to the spec's folder, ``command`` writes or renews the entry, ``reason`` is why
    nothing was compared. ``looks`` is 2 if it was measured a second time, with more samples, before judging.
    ``notes`` list other differences between the two runs. ``history`` are the figures of this device, the
    oldest first, the one compared with last; ``elsewhere`` the present ones of other devices.
    """

    state: BaselineState
    file: str = ""
    command: str = ""
    reason: str = ""
    required: bool = False  # whether an incomparable baseline is a failure
    baseline: Interval | None = None
    ratio: Interval | None = None
    change: TimeChange | None = None
    looks: int = 1
    builds: int = 0
    recorded: str = ""
    notes: tuple[str, ...] = ()
    history: tuple[BaselineFigure, ...] = ()
    elsewhere: tuple[BaselineFigure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLatency:
    """Latency at one shape profile: its shapes in words, its share of the objective, and times over the reference's."""

    name: str
    share: float
    ratios: Mapping[str, Interval]  # by role


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLine:
    """The measurement of a role over all shape profiles (``at`` is empty), or at one: ``at x 1x64 (30 %)``.

    ``reference`` are the samples that the ratio refers to, and ``clock`` is the gating clock.
    """

    role: str
    at: str
    samples: Samples
    reference: Samples
    ratio: Interval | None
    clock: Clock

    @property
    def median_ms(self) -> float:
        """Milliseconds on the gating clock: the reference's median times the ratio, which is computed within rounds.

        The median of the role's own samples may contradict it: its builds can run at other speeds of the machine.
        """
        if self.ratio is None or not self.reference.on(self.clock):
            return self.samples.median_ms(self.clock)
        return self.reference.median_ms(self.clock) * self.ratio.median

    def run_ms(self, clock: Clock) -> tuple[float, ...]:
        """Milliseconds of single runs. On the gating clock they are scaled so that their median is `median_ms`."""
        times = self.samples.on(clock)
        if clock != self.clock or not times:
            return times
        scale = self.median_ms / self.samples.median_ms(clock)
        return tuple(scale * milliseconds for milliseconds in times)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTest:
    """A role's time over the reference's, with 95 % confidence intervals, for tests of a gain.

    ``mean`` is the geometric mean of the ratios in two conditions of the caches: runs in a row, and first runs after
    another model. ``enclosing`` encloses the intervals of both.
    """

    mean: Interval
    enclosing: Interval

    @property
    def at_least(self) -> float:
        """The speed-up that is proved: the reciprocal of the upper end of the mean, which decides on a gain."""
        return self.mean.inverse.low

    def proves(self, gain: float) -> bool:
        """Whether the mean is proved to be below ``1 - gain``, and the ratio below 1 in both conditions."""
        return self.mean.high < 1 - gain and self.enclosing.high < 1

    def excludes(self, gain: float) -> bool:
        """Whether the mean is proved to be above ``1 - gain``."""
        return self.mean.low > 1 - gain


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyEvidence:
    """Final interleaved measurement over fresh builds, by role.

    Roles: ``reference``, ``tuned``, and if they differ from these ``everything`` (everything quantized) and
    ``runner-up``. ``ratios[role]`` is the role's time over the reference's, ``speedup`` the reference's over the tuned
    one's, with 95 % prediction intervals, for the ratio that another program measures at another time. ``tested`` has
    confidence intervals, for tests of a gain. With several shape ``profiles``, samples and ratios are weighted
    geometric means over them.
    """

    clock: Clock
    samples: Mapping[str, Samples]
    ratios: Mapping[str, Interval]
    speedup: Interval
    builds: int
    provenance: Provenance = Provenance()
    failures: Mapping[str, str] = field(default_factory=dict)  # why a role has no samples
    drift: float = 0.0  # slowdown of the machine from the beginning to the end, as a share
    profiles: tuple[ProfileLatency, ...] = ()  # empty for a single profile
    tested: Mapping[str, RatioTest] = field(default_factory=dict)  # empty in records of older versions

    @property
    def at_least(self) -> float | None:
        """The speed-up of the tuned model that is proved; ``None`` if it was not tested."""
        tested = self.tested.get("tuned")
        return None if tested is None else tested.at_least

    @property
    def tested_speedup(self) -> Interval:
        """The speed-up with an interval that both conditions support; ``speedup`` if it was not tested."""
        tested = self.tested.get("tuned")
        return self.speedup if tested is None else tested.enclosing.inverse

    def median_ms(self, role: str) -> float:
        """Milliseconds of a role on the gating clock, consistent with its ratio to the reference."""
        return self.line(role).median_ms

    def line(self, role: str, profile: int | None = None) -> LatencyLine:
        """The measurement of a role over all shape profiles, or at one of them."""
        own, reference = self.samples[role], self.samples.get("reference", Samples())
        ratio, at = self.ratios.get(role), ""
        if profile is not None:
            shape = self.profiles[profile]
            own = own.profiles[profile]
            reference = reference.profiles[profile] if reference.profiles else Samples()
            ratio, at = shape.ratios.get(role), f"at {shape.name} ({shape.share:.0%})"
        return LatencyLine(role=role, at=at, samples=own, reference=reference, ratio=ratio, clock=self.clock)

    def lines(self) -> Iterator[LatencyLine]:
        """Each role over all profiles, followed by its profiles if there are several."""
        for role in self.samples:
            yield self.line(role)
            for number in range(len(self.profiles)):
                yield self.line(role, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyEvidence:
    """A task metric of reference and tuned model on labelled data. Higher is better.

    For metrics that judge sample by sample, ``lost`` are those that only the reference has right, ``gained`` the
    opposite.
    """

    metric: str
    reference: float
    tuned: float
    samples: int
    lost: int | None = None
    gained: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPair:
    """A site of the selected model, with its numbers. Scales of channels and blocks are in the order of memory.

    ``outer`` multiplies them all if a format quantizes its scales too. A weight is ``stored`` as integers
    behind a DequantizeLinear, or else stays float behind both. ``rounding`` has the differences of its integers
    from the nearest ones, ``bias`` the shift of the bias of its layer: see `qdqspec.qdq.quantizer`.
    """

    site: Site
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    stored: bool = True
    outer: float | None = None
    rounding: str = ""
    bias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalEvidence:
    """The Q/DQ pairs of a model after one optimizer.

    ``kept`` pairs are still Q/DQ, ``integer`` ones were fused into integer kernels; ``lost`` names the others: ``tensor
    > node:input``. ``error`` is why the optimizer could not be run.
    """

    optimizer: Optimizer
    kept: int = 0
    integer: int = 0
    lost: tuple[str, ...] = ()
    error: str = ""
    cure: str = ""

    @property
    def pairs(self) -> int:
        """Number of pairs in the model."""
        return self.kept + self.integer + len(self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvidence:
    """A build of the tuned model by a backend for one ``target``, a value of its option ``for``; empty for its own.

    ``refused`` is the backend's reason if it does not build the model, ``missing`` why the backend cannot be used
    here. ``heavy`` counts the kernels of convolutions, products and attention; ``narrow`` of them compute in 8 bits.
    ``layers`` are its kernels, and ``ops`` the operators of the tuned model's nodes.
    """

    backend: str
    target: str = ""
    refused: str = ""
    missing: str = ""
    cure: str = ""
    kernels: int = 0
    narrow: int = 0
    heavy: int = 0
    layers: tuple[LayerTime, ...] = ()
    ops: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The share of heavy kernels that compute in 8 bits; ``None`` if none are known."""
        return self.narrow / self.heavy if self.heavy else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A lint finding about one node, or about the whole model if ``node`` is empty.

    ``refused`` is something that a target does not build or computes wrongly, ``slow`` costs time there,
    ``note`` is information. ``id`` is documented and stable; ``source`` cites the evidence.
    """

    id: str
    severity: FindingSeverity
    node: str
    message: str
    title: str
    cure: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWork:
    """The nodes of the selected model that do quantized work; nodes that only move data are none of them.

    With ``runs``, a kernel of the backend computes them in a narrow format. Without, the backend reports no kernels:
    these are the heavy nodes that read a Q/DQ pair, which may run in floating point.
    """

    nodes: tuple[str, ...]
    runs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """Nodes of the model that reports draw as one box: those of a kernel, or of a region with several.

    ``ops`` counts its nodes by operator, ``formats`` those that compute in a number format; all others compute in
    floating point. Milliseconds are of its kernels in one profile, ``None`` without one. ``sqnr_db`` is the error of
    its blocks with all others in floating point, if it was measured. ``inputs`` are the positions of parts it reads.
    """

    name: str  # of its first node that does the main work, else of its first
    ops: Mapping[str, int]
    formats: Mapping[str, int] = field(default_factory=dict)
    reference_ms: float | None = None
    tuned_ms: float | None = None
    sqnr_db: float | None = None
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence of a case that its checks judge. Parts that were not requested are empty, or
    ``None``.

    ``skipped`` is why the case could not run here; the other parts are empty then.
    """

    case: Case
    backend: str
    target: str  # backend and variant, joined by a hyphen
    device: DeviceKey
    model_sha256: str
    model_nodes: str = ""  # digests of its nodes: see `qdqspec._core.node_digests`
    search: SearchResult | None = None
    pairs: tuple[PlacedPair, ...] = ()
    latency: LatencyEvidence | None = None
    parity: ParityEvidence | None = None
    culprits: CulpritEvidence | None = None  # if parity exceeds a limit of its checks
    parity_search: Mapping[str, ParitySearch] = field(default_factory=dict)  # by parameters of its checks
    replays: Mapping[str, str] = field(default_factory=dict)  # commands that repeat a failed parity check
    accuracy: Mapping[str, AccuracyEvidence] = field(default_factory=dict)  # by metric
    size_bytes: Mapping[str, int] = field(default_factory=dict)  # "reference", "tuned"
    survival: Mapping[Optimizer, SurvivalEvidence] = field(default_factory=dict)
    regression: Mapping[str, RegressionEvidence] = field(default_factory=dict)  # by name of baseline entry
    lint: Mapping[LintTarget, tuple[Finding, ...]] = field(default_factory=dict)
    lint_loads: Mapping[LintTarget, str] = field(
        default_factory=dict
    )  # the runtime that loaded it, or why none
    builds: Mapping[str, BuildEvidence] = field(default_factory=dict)  # of `BuildRequest`, by its key
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of `FigureRequest`, by its key
    profiles: tuple[ShapeProfile, ...] = ()  # the input shapes that were declared or follow from the data
    node_ops: Mapping[str, str] = field(default_factory=dict)  # op type of every node, without Q/DQ
    quantized: QuantizedWork | None = None  # of a model that was tuned
    graph: tuple[GraphPart, ...] = ()  # the model in a few parts, for reports
    output: Path | None = None  # the folder of this case's files
    warnings: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def status(self) -> Status:
        """The result of the case in one word."""
        if self.skipped:
            return "skipped"
        if self.search is None:
            return "not run"
        if self.search.unchanged:
            return "unchanged"
        return "untimed" if self.search.coverage is not None and self.latency is None else "tuned"

    @property
    def reason(self) -> str:
        """The reason for the status of the case."""
        return self.skipped or (self.search.reason if self.search is not None else "")

    @property
    def min_gain(self) -> float:
        """The saving of time that the search had to prove; 0 without a search."""
        return 0.0 if self.search is None else self.search.limits.min_gain

    @property
    def metrics(self) -> dict[str, float]:
        """All known task metrics of the selected model: from its checks, else from the search."""
        bound = self.search.accuracy if self.search is not None else None
        held = {} if bound is None else {bound.metric: bound.selected}
        return held | {name: found.tuned for name, found in self.accuracy.items()}


ERROR_TITLE = "Error"  # of the section with the whole text of an error that kept a check from being judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled table of a verdict's body: ``rows`` under ``headers``, or free ``text``."""

    title: str
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check. ``headline`` is a complete sentence shorter than 80 columns."""

    outcome: Outcome
    headline: str
    sections: tuple[Section, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""  # what to do next; empty for a pass
    command: str = ""  # a command that decides an inconclusive verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A verdict with its check."""

    id: str
    kind: str
    severity: Severity
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One case of a run: its evidence and the results of its checks."""

    evidence: Evidence
    results: tuple[CheckResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, as input of reports. ``started`` is an ISO 8601 time in UTC.

    ``runtimes`` are comparisons of cases that differ in the runtime only.
    """

    version: str
    started: str
    seconds: float
    cases: tuple[CaseRecord, ...]
    runtimes: tuple[RuntimeComparison, ...] = ()
