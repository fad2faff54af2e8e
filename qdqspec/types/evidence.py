"""All that is known of a case when its checks judge it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qdqspec.types.asked import Case
from qdqspec.types.compared import RegressionEvidence
from qdqspec.types.measured import DeviceKey, Interval, Provenance, Samples, SearchResult
from qdqspec.types.parity import CulpritEvidence, ParityEvidence, ParitySearch
from qdqspec.types.placed import Site
from qdqspec.types.words import Clock, FindingSeverity, LintTarget, Optimizer, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLatency:
    """One of several shape profiles: its shapes in words, its share of the objective, times over the reference's."""

    name: str
    share: float
    ratios: Mapping[str, Interval]  # by role


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLine:
    """What was measured of a role: at one of several profiles, ``at x 1x64 (30 %)``, or (``at`` empty) at all.

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
        """Milliseconds on the gating clock: the reference's median times the ratio.

        The ratio is taken within rounds, so that a change of the processor's speed affects both sides. The median of
        the role's own samples may contradict it, because its builds can meet another mixture of speeds.
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
class LatencyEvidence:
    """Final interleaved measurement over fresh builds, by role.

    Roles: ``reference``, ``tuned``, and where they differ from these ``everything`` (all of it quantized)
    and ``runner-up``. ``ratios[role]`` is the role's time over the reference's, ``speedup`` the reference's
    over the tuned one's. With several shape ``profiles``, samples and ratios are weighted geometric means over
    them, and each sample's own profiles stand in the same order as ``profiles``.
    """

    clock: Clock
    samples: Mapping[str, Samples]
    ratios: Mapping[str, Interval]
    speedup: Interval
    builds: int
    provenance: Provenance = Provenance()
    failures: Mapping[str, str] = field(default_factory=dict)  # why a role has no samples
    drift: float = 0.0  # how much slower the machine was at the end than at the beginning, as a share
    profiles: tuple[ProfileLatency, ...] = ()  # none where there is one

    def median_ms(self, role: str) -> float:
        """Milliseconds of a role on the gating clock, consistent with its ratio to the reference."""
        return self.line(role).median_ms

    def line(self, role: str, profile: int | None = None) -> LatencyLine:
        """A role as a whole, or at one of several shape profiles."""
        own, reference = self.samples[role], self.samples.get("reference", Samples())
        ratio, at = self.ratios.get(role), ""
        if profile is not None:
            shape = self.profiles[profile]
            own = own.profiles[profile]
            reference = reference.profiles[profile] if reference.profiles else Samples()
            ratio, at = shape.ratios.get(role), f"at {shape.name} ({shape.share:.0%})"
        return LatencyLine(role=role, at=at, samples=own, reference=reference, ratio=ratio, clock=self.clock)

    def lines(self) -> Iterator[LatencyLine]:
        """Every role as a whole, and behind each its profiles where there are several."""
        for role in self.samples:
            yield self.line(role)
            for number in range(len(self.profiles)):
                yield self.line(role, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyEvidence:
    """A task metric of reference and tuned model on labelled data. Higher is better.

    Of metrics that judge sample by sample, ``lost`` are the samples that the reference has right and the tuned model
    has wrong, ``gained`` those the other way round.
    """

    metric: str
    reference: float
    tuned: float
    samples: int
    lost: int | None = None
    gained: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPair:
    """A site as shipped, with its numbers. Scales of channels and blocks are listed in the order of memory.

    ``outer`` multiplies them all where a format quantizes its scales too.
    A weight is ``stored`` as integers behind a DequantizeLinear, or else stays as it was behind both.
    """

    site: Site
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    stored: bool = True
    outer: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalEvidence:
    """What one optimizer left of the Q/DQ pairs of a model.

    ``kept`` pairs still stand as Q/DQ, ``integer`` ones went into kernels that compute in integers; ``lost``
    names the others: ``tensor > node:input``. Where the optimizer could not be run, ``error`` says why.
    """

    optimizer: Optimizer
    kept: int = 0
    integer: int = 0
    lost: tuple[str, ...] = ()
    error: str = ""
    cure: str = ""

    @property
    def pairs(self) -> int:
        """How many pairs the model had."""
        return self.kept + self.integer + len(self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What lint has to say of one node, or of the whole model where ``node`` is empty.

    ``refused`` is what a target does not build or computes wrongly, ``slow`` what costs time there, ``note`` what is
    worth knowing. ``id`` is documented and stable; ``source`` says how it is known.
    """

    id: str
    severity: FindingSeverity
    node: str
    message: str
    title: str
    cure: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a case when its checks judge it. Parts that were not asked for are ``None``.

    ``skipped`` is why the case could not run here; nothing else is known of it then.
    """

    case: Case
    backend: str
    target: str  # backend and variant: onnxruntime-cpu
    device: DeviceKey
    model_sha256: str
    search: SearchResult | None = None
    pairs: tuple[PlacedPair, ...] = ()
    latency: LatencyEvidence | None = None
    parity: ParityEvidence | None = None
    culprits: CulpritEvidence | None = None  # of a case whose parity is not what its checks ask
    parity_search: Mapping[str, ParitySearch] = field(default_factory=dict)  # by what its checks ask
    accuracy: Mapping[str, AccuracyEvidence] = field(default_factory=dict)  # by metric
    size_bytes: Mapping[str, int] = field(default_factory=dict)  # "reference", "tuned"
    survival: Mapping[Optimizer, SurvivalEvidence] = field(default_factory=dict)
    regression: Mapping[str, RegressionEvidence] = field(default_factory=dict)  # by name of baseline entry
    lint: Mapping[LintTarget, tuple[Finding, ...]] = field(default_factory=dict)
    node_ops: Mapping[str, str] = field(default_factory=dict)  # op type of every node, without Q/DQ
    output: Path | None = None  # the folder of this case's files
    warnings: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def status(self) -> Status:
        """What became of the case."""
        if self.skipped:
            return "skipped"
        if self.search is None:
            return "not run"
        return "unchanged" if self.search.unchanged else "tuned"

    @property
    def reason(self) -> str:
        """Why the case has its status."""
        return self.skipped or (self.search.reason if self.search is not None else "")

    @property
    def metrics(self) -> dict[str, float]:
        """Every task metric known of what is shipped: as its checks took it, else as the search was held to it."""
        bound = self.search.accuracy if self.search is not None else None
        held = {} if bound is None else {bound.metric: bound.shipped}
        return held | {name: found.tuned for name, found in self.accuracy.items()}
