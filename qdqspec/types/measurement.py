"""Records of measurements: times, differences of outputs from a reference, and comparisons of runtimes.

Two versions of a runtime are compared by an upgrade check. The float and the tuned model are timed interleaved under
each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from qdqspec.types.case import Site

Clock: TypeAlias = Literal["cpu", "wall"]
# Prefix of a note on an engine whose runs are launched one by one, not as a CUDA graph.
NOT_CAPTURED = "not recorded as a CUDA graph"
EXACT_DB = 200.0  # the SQNR of equal outputs as a finite number
DEFINED_DB = 40.0  # least SQNR of a run against ONNX's definition: below, its outputs are not relied on


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Milliseconds of single runs, on both clocks. ``cpu_ms`` is empty if it is not meaningful.

    ``notes`` are the runtime's own remarks: unstable, limited by something else. If a model runs at several
    shape profiles, a sample is the weighted geometric mean of one run at each, and ``profiles`` holds these.
    ``first`` are, sample by sample, runs that followed another model\'s; the samples themselves are of runs in a row.
    """

    wall_ms: tuple[float, ...] = ()
    cpu_ms: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    profiles: tuple[Samples, ...] = ()
    first: Samples | None = None

    @property
    def launched_singly(self) -> bool:
        """Whether some of the runs were launched one by one, where a CUDA graph was wanted."""
        return any(note.startswith(NOT_CAPTURED) for note in self.notes)

    def on(self, clock: Clock) -> tuple[float, ...]:
        """The samples on a clock; wall time if thread CPU time was not measured."""
        return self.cpu_ms if clock == "cpu" and self.cpu_ms else self.wall_ms

    def median_ms(self, clock: Clock) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.on(clock))

    def between(self, clock: Clock) -> tuple[float, ...]:
        """Sample by sample, the geometric mean of both conditions, if both were measured; else of runs in a row."""
        if self.first is None:
            return self.on(clock)
        pairs = zip(self.on(clock), self.first.on(clock), strict=True)
        return tuple(math.sqrt(steady * first) for steady, first in pairs)

    def __add__(self, other: Samples) -> Samples:
        profiles = self.profiles or other.profiles
        if self.profiles and other.profiles:
            profiles = tuple(one + more for one, more in zip(self.profiles, other.profiles, strict=True))
        return Samples(
            wall_ms=self.wall_ms + other.wall_ms,
            cpu_ms=self.cpu_ms + other.cpu_ms,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            profiles=profiles,
            first=self.first + other.first if self.first and other.first else self.first or other.first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One executed kernel: its time in milliseconds, and the ONNX nodes that it computes.

    ``boundary`` marks kernels that only convert (quantize, dequantize, reorder, transpose inserted by the
    runtime); their time is assigned to ``tensors``. ``integer`` is true if the kernel computes on integers,
    or on another narrow format such as fp8. ``precision`` is, if the runtime reports it, the format of the
    computation and that of the result: ``int8 > fp16``. ``place`` is where it runs, if the runtime has several places.
    """

    name: str
    op_type: str
    milliseconds: float
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    boundary: bool = False
    integer: bool = False
    precision: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate with the bounds of a 95 % interval: of confidence, or of prediction where that is stated."""

    median: float
    low: float
    high: float

    @property
    def inverse(self) -> Interval:
        """The interval of the reciprocal: a speed-up from a ratio of times."""
        high = math.inf if self.low == 0 else 1 / self.low
        return Interval(median=1 / self.median, low=1 / self.high, high=high)

    @property
    def exponential(self) -> Interval:
        """The interval of a ratio from that of its natural logarithm."""
        return Interval(median=math.exp(self.median), low=math.exp(self.low), high=math.exp(self.high))

    def widened(self, factor: float) -> Interval:
        """The interval of a positive ratio with ``factor`` times its width, in logarithms."""
        low, high = (self.median * (bound / self.median) ** factor for bound in (self.low, self.high))
        return Interval(median=self.median, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKey:
    """The key of baselines and caches for a device (``key``), and facts that are only recorded (``details``)."""

    key: str
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The source of a number, and its age in seconds; ``untimed`` if a placement was selected without times."""

    source: Literal["measured", "cached", "replayed", "untimed"] = "measured"
    age_seconds: float = 0.0


# ---- outputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstSlice:
    """The slice of an output along an axis that has the lowest SQNR, over all samples."""

    axis: int
    index: int
    sqnr_db: float

    @property
    def text(self) -> str:
        """The slice in words."""
        return f"slice {self.index} of axis {self.axis}"


NO_NUMBER = "equal: NaN or infinite in every sample"  # notes of such outputs
NO_SIGNAL = "equal: zero in every sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParity:
    """Difference of one output from the reference's.

    ``sqnr_db`` is ten times the log of signal power over noise power (infinite if equal), ``max_abs`` the
    largest absolute difference, ``max_steps`` the same in steps of an 8-bit grid over the reference's range.
    ``agreement`` is the share of the reference's best classes that are also its own, by `TopK.key`, if it has
    that many classes. ``is_single`` is true if each sample has one number, whose cosine is always 1 or -1: tables leave
    it out. ``worst_slice`` is the slice with the lowest SQNR; ``None`` if no slice has enough values and signal.
    """

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float
    max_steps: float
    # false if the output is not a float tensor, or has no finite value, and was compared for equality
    compared: bool = True
    matches: bool = True
    note: str = ""  # why it could not be compared, or did not match
    agreement: Mapping[str, float] = field(default_factory=dict)  # by `TopK.key`
    is_single: bool = False
    worst_slice: WorstSlice | None = None

    @property
    def slice_sqnr_db(self) -> float | None:
        """The SQNR of the worst slice."""
        return None if self.worst_slice is None else self.worst_slice.sqnr_db

    def far_slice(self, far_db: float = 20.0) -> WorstSlice | None:
        """The worst slice if its SQNR is ``far_db`` below that of the whole, and below ``far_db``; else ``None``.

        With a smaller distance, outputs are reported whose slices differ only in the power of their signal.
        """
        found = self.worst_slice if self.compared and self.matches else None
        is_far = found is not None and found.sqnr_db <= min(self.sqnr_db - far_db, far_db)
        return found if is_far else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Parameters of the agreement: how many of the ``k`` best classes two outputs share.

    Classes are along ``axis``; if it is ``None``, along the last axis longer than one, but never the first of
    several, which counts samples.
    """

    k: int = 1
    axis: int | None = None

    @property
    def key(self) -> str:
        """``top5``, or ``top5 on axis 1``."""
        return f"top{self.k}" if self.axis is None else f"top{self.k} on axis {self.axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionEvidence:
    """The given model as the backend runs it, compared with its definition in ONNX on the first samples.

    ``sqnr_db`` is that of the worst float ``output``, finite. ``node`` is the first node whose output differs so much;
    empty if it is not known.
    """

    sqnr_db: float
    output: str
    samples: int
    node: str = ""

    @property
    def holds(self) -> bool:
        """Whether the backend computes what ONNX defines, but for rounding."""
        return self.sqnr_db >= DEFINED_DB


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityEvidence:
    """Parity of the tuned model with the reference, over ``samples`` inputs.

    ``outputs`` compare the float model with the tuned one, both as the backend runs them. The two steps between:
    ``quantization`` compares the float model with the tuned one computed as ONNX defines it, ``runtime`` this
    arithmetic with the result of the backend; ``undivided`` is why both are empty. ``computed_by`` is the runtime that
    computed both models as ONNX defines them, if the backend runs nothing on this machine. If the given model's
    ``definition`` in ONNX does not hold, it is in place of the float model above.
    """

    outputs: tuple[TensorParity, ...]
    samples: int
    data: str  # "evaluation", "calibration" or "random"
    quantization: tuple[TensorParity, ...] = ()
    runtime: tuple[TensorParity, ...] = ()
    undivided: str = ""
    computed_by: str = ""
    definition: DefinitionEvidence | None = None

    @property
    def sqnr_db(self) -> float:
        """The worst output's SQNR in dB, a finite number: 200 if all outputs are equal."""
        worst = min((o.sqnr_db for o in self.outputs), default=EXACT_DB)
        return max(-EXACT_DB, min(EXACT_DB, worst))

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
class Culprit:
    """One Q/DQ pair and its error.

    ``alone_db`` is the SQNR with this pair only, ``share`` its part of the error of all pairs. ``without_db``, known
    for the worst pairs only, is the SQNR if all that its readers, and those of the worse pairs, read stays in float.
    """

    site: Site
    alone_db: float
    share: float
    without_db: float | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that read the pair: excluding them from quantization removes the pair."""
        return tuple(dict.fromkeys(end.node for end in self.site.consumers if not end.is_output))

    @property
    def makes_output(self) -> bool:
        """Whether the pair quantizes a graph output."""
        return any(end.is_output for end in self.site.consumers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritEvidence:
    """The error of single Q/DQ pairs at one output, the worst first, over a few samples of ``data``.

    ``together_db`` is the SQNR with all ``total`` pairs, ``rest`` the part of the error of pairs not listed. All is
    computed as ONNX defines the operators: it shows quantization, not the runtime. ``model_db`` is the SQNR of the
    quantized model from which the pairs were read, if it was measured. ``missing`` is why pairs are not listed.
    """

    output: str = ""
    pairs: tuple[Culprit, ...] = ()
    total: int = 0
    rest: float = 0.0
    together_db: float = math.inf
    samples: int = 0
    data: str = ""
    model_db: float | None = None
    missing: str = ""

    def holds(self, near_db: float = 1.0) -> bool:
        """Whether all pairs together have about the error of the model from which they were read, if that is known."""
        return self.model_db is None or abs(self.model_db - self.together_db) <= near_db


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedInput:
    """One input of a model in a search: its values in words, their bounds, and the bounds seen in data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: str
    low: float
    high: float
    known_low: float
    known_high: float

    @property
    def within(self) -> bool:
        """Whether all its values are in the range seen in data."""
        return self.known_low <= self.low and self.high <= self.known_high


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One input that was tried alone, and messages of the limits it breaks, if any.

    ``parity`` is that of this input; it has no outputs if the tuned model does not run on it. ``file`` holds
    the input, and ``command`` tries it again: one command a line.
    """

    inputs: tuple[TriedInput, ...]
    broken: tuple[str, ...]
    parity: ParityEvidence
    file: str = ""
    command: str = ""

    @property
    def within(self) -> bool:
        """Whether all of it is in the range seen in data."""
        return all(one.within for one in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySearch:
    """A search for an input that breaks a parity check: ``tried`` different ones in ``seconds``.

    ``late`` is whether the time ended first. ``closest_db`` is the smallest SQNR of inputs that did not break it,
    ``found`` the smallest input that does. ``missing`` is why nothing was tried.
    """

    tried: int = 0
    seconds: float = 0.0
    late: bool = False
    closest_db: float = math.inf
    found: Probe | None = None
    missing: str = ""


# ---- runtimes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModel:
    """The float or the tuned model of one case, on the runtime of that case.

    ``ratio`` is its time over that of the reference, the fastest float model; ``to_winner`` over that of the winner.
    ``limit_db`` is set if its SQNR is below that limit, so that it cannot win. ``failure`` is why it was not timed.
    """

    case: str
    backend: str
    target: str
    model: Literal["float", "tuned"]
    scheme: str = ""  # digest of the placement
    pairs: int = 0
    median_ms: float | None = None
    ratio: Interval | None = None
    to_winner: Interval | None = None
    samples: Samples = field(default_factory=Samples)
    sqnr_db: float | None = None
    limit_db: float | None = None
    failure: str = ""

    @property
    def label(self) -> str:
        """Backend and model: unique within a comparison."""
        return f"{self.backend} {self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeComparison:
    """The models of cases that differ in the runtime only, timed in one interleaved run of fresh builds.

    ``name`` is the common part of the cases' names. ``reference`` is the label of the fastest float model, ``winner``
    that of the fastest model that is accurate enough.
    """

    name: str
    clock: Clock
    builds: int
    models: tuple[RuntimeModel, ...]
    reference: str
    winner: str
    drift: float = 0.0
    seconds: float = 0.0

    def named(self, label: str) -> RuntimeModel:
        """The model with that label."""
        return next(model for model in self.models if model.label == label)

    @property
    def tied(self) -> tuple[RuntimeModel, ...]:
        """Models that may win and are not proved slower than the winner."""
        return tuple(
            model
            for model in self.models
            if model.label != self.winner
            and model.limit_db is None
            and model.to_winner is not None
            and model.to_winner.low <= 1
        )


LayerChangeKind: TypeAlias = Literal["time", "precision", "fusion"]
UpgradeState: TypeAlias = Literal["ok", "slower", "slower than float", "less accurate", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """Kernels that compute the same ONNX nodes and differ between two versions, with their milliseconds.

    ``tensors`` are tensors that the kernels only convert. ``kinds`` states the kinds of differences; ``before``
    and ``after`` describe the kernels: operators, nodes, precision.
    """

    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    kinds: tuple[LayerChangeKind, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    before_ms: float
    after_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A tuned model under both versions, timed interleaved; ``here`` is the present one, ``there`` the other.

    ``change`` is the tuned model's time there over here, ``float_change`` that of the float model. ``ratio_here`` and
    ``ratio_there`` are the tuned model's time over the float model's, each under one version. SQNRs are those of the
    tuned model's outputs against the float model's here.
    """

    case: str
    backend: str
    state: UpgradeState
    reason: str = ""
    clock: Clock = "cpu"
    here_ms: float | None = None
    there_ms: float | None = None
    change: Interval | None = None
    float_change: Interval | None = None
    ratio_here: Interval | None = None
    ratio_there: Interval | None = None
    sqnr_here_db: float | None = None
    sqnr_there_db: float | None = None
    layers: tuple[LayerChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeCheck:
    """All cases of an upgrade check. ``allowed`` is the share that a tuned model may be slower.

    ``here`` and ``there`` are facts of both environments, such as versions, by backend.
    """

    allowed: float
    here: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    there: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cases: tuple[Upgrade, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every tuned model runs there, fast and accurate enough."""
        return all(case.state == "ok" for case in self.cases)
