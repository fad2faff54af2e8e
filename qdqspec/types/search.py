"""Records of a search: trials and their races, its result, and what it learned of single units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qdqspec.types.case import Placement, SearchLimits
from qdqspec.types.measurement import Interval, LayerTime, Provenance, Samples, TensorParity


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A challenger against the incumbent, in interleaved pairs. ``ratio`` is challenger over incumbent.

    ``interval`` is that of the signed ranks of the pairs, for these builds; ``None`` for fewer than six.
    """

    opponent: str
    ratio: float
    p_value: float
    pairs: int
    verdict: Literal["faster", "slower", "no difference", "same graph"]
    interval: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate: its placement, whether it was built, and its measurements. A failure is data, not an exception."""

    number: int
    phase: str
    placement: Placement
    status: Literal["ok", "failed"] = "ok"
    error: str | None = None
    samples: Samples = Samples()
    rival: Samples = Samples()  # of its opponent in the race, pair by pair with its own
    build_seconds: float = 0.0
    graph_hash: str = ""
    layers: tuple[LayerTime, ...] = ()
    race: Race | None = None
    incumbent: bool = False  # true if it became the incumbent
    # time over the reference's: by its race with the incumbent, or by a few runs if it was not raced
    ratio: float | None = None
    subgraph: tuple[str, ...] = ()  # the nodes it was built of, if not the whole model
    sqnr_db: float | None = None  # of the worst output on the first samples, if accuracy is constrained
    accuracy: float | None = None  # a task metric on all evaluation data, if it was computed
    all_data_db: float | None = None  # the same SQNR on all data, where ``sqnr_db`` is of the first samples
    is_part: bool = False  # whether that is a part of all data that decided whether the limit is met
    eps: float | None = None  # the smallest share of time that counts, once builds were compared

    @property
    def ok(self) -> bool:
        """Whether it was built and timed."""
        return self.status == "ok"

    @property
    def is_candidate(self) -> bool:
        """Whether it timed a quantized candidate, a whole model with its final numbers."""
        is_whole = not self.subgraph and self.phase not in NOT_CANDIDATES
        return self.ok and bool(self.placement.sites) and is_whole

    def reaches(self, min_sqnr_db: float | None, min_accuracy: float | None = None) -> bool:
        """Whether it is accurate enough. A task metric is known of few trials and is checked only for these."""
        if min_accuracy is not None and self.accuracy is not None and self.accuracy < min_accuracy:
            return not self.placement.sites
        return min_sqnr_db is None or (self.sqnr_db is not None and self.sqnr_db >= min_sqnr_db)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A Pareto-optimal placement, by its digest: no other one is better in both measured latency and accuracy.

    ``pairs`` is the number of activations it quantizes, ``ratio`` its time over the reference's, from fresh builds;
    ``sqnr_db`` is that of its worst output, ``accuracy`` the constrained task metric, if there is one.
    """

    placement: str
    pairs: int
    ratio: Interval
    sqnr_db: float
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyBound:
    """The accuracy constraint of a search on a task metric: the selected model was scored and reached ``least``.

    ``selected`` is the value of the selected model; ``best`` is the best of all quantized candidates that were scored;
    ``scored`` is their number, each on all ``samples``.
    """

    metric: str
    least: float
    reference: float
    selected: float
    best: float | None
    scored: int
    samples: int


FLOAT32 = "float32"  # role of the model without pairs where candidates are converted to float32
GIVEN = "given"  # phase and role of the model as it was given, if it is quantized
# Phases whose builds are not candidates: they repeat one, or build a part of the model.
NOT_CANDIDATES = ("confirm", "noise", "commit", "isolated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The coverage of a placement that was selected without timing: multiplications of one inference.

    ``quantized`` of ``multiplications`` are in units with a narrow format. ``sqnr_db`` is the SQNR expected by a
    rehearsal, if it was limited. ``conversions`` are the kernels that only convert, of ``kernels``, as the backend
    lists them; both are 0 if it lists none. ``refused`` are the units that it did not build, or computes in floating
    point, with its reason.
    """

    multiplications: int
    quantized: int
    sqnr_db: float | None = None
    kernels: int = 0
    conversions: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the multiplications in narrow formats."""
        return self.quantized / self.multiplications if self.multiplications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChange:
    """Kernels of the same nodes, or the conversions before them: milliseconds in the profiles of two models."""

    place: str
    reference_ms: float
    tuned_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelComparison:
    """The kernels of a candidate beside those of the reference, each from one profile.

    ``reference_ms`` and ``tuned_ms`` are the sums of all layers. Of their difference, ``conversions_ms`` are Q, DQ and
    conversions, ``slower_ms`` the kernels that take longer than in the reference and ``faster_ms`` the others;
    ``slower`` and ``faster`` are the places with the largest differences. ``unfused`` Q and DQ are kernels of their
    own. ``left_in_float`` counts, by operator, the kernels that read quantized inputs and compute in float.
    """

    kernels: int
    integer: int
    unfused: int
    left_in_float: Mapping[str, int]
    reference_ms: float
    tuned_ms: float
    conversions_ms: float
    slower_ms: float
    faster_ms: float
    slower: tuple[PlaceChange, ...] = ()
    faster: tuple[PlaceChange, ...] = ()


SLOWER, UNPROVED = "slower", "gain not proved"  # reasons of candidates within the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCandidate:
    """A quantized candidate of a search that selected the reference, and why it was not selected.

    ``role`` names it: the fastest candidate, the fastest candidate within the limits, the most accurate faster
    candidate, everything quantized.
    ``ratio`` is its time over the reference's, from the confirmation if ``is_confirmed``, else from one race, without
    an interval. ``kernels`` is ``None`` if it has no profile.
    """

    role: str
    placement: str
    pairs: int
    ratio: Interval
    is_confirmed: bool
    sqnr_db: float | None
    accuracy: float | None
    reason: str
    kernels: KernelComparison | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search. ``unchanged`` is true if the reference itself is selected; ``reason`` states why.

    ``seconds`` and ``cpu_seconds``, the CPU time of its process without those of the engines, are of its last run if it
    was interrupted. ``float_runs`` is its cost: how many runs of the reference ``seconds`` are worth. ``ended_by`` is
    the limit that ended it, or `expected gain below 1 %`; empty if its strategy proposed nothing more. Of a search that
    a limit ended, ``cut_short`` states what it did not try and how to continue; of one that expected too little,
    ``ended`` states it. ``rejected`` are candidates that were not selected, if the result is unchanged. A search with a
    ``coverage`` timed nothing.
    If candidates were ``converted_from`` another float type, the first of the ``trials`` is the converted model
    without pairs, to whose time the ratios of trials refer.
    """

    winner: Placement
    trials: tuple[Trial, ...]
    unchanged: bool
    reason: str
    strategy: str
    seconds: float
    cpu_seconds: float
    eps: float
    blocks: int
    regions: int
    patterns: int
    float_runs: float | None = None
    ended_by: str = ""
    cut_short: str = ""
    ended: str = ""
    rejected: tuple[RejectedCandidate, ...] = ()
    front: tuple[FrontPoint, ...] = ()  # of a search for latency and accuracy: fastest first
    accuracy: AccuracyBound | None = None  # if a task metric was a constraint
    limits: SearchLimits = field(default_factory=SearchLimits)
    errors: tuple[BlockError, ...] = ()  # of single blocks, worst first
    errors_missing: str = ""  # why there are no errors of single blocks
    corrections: tuple[CorrectionGain, ...] = ()  # those tried before the search
    coverage: Coverage | None = None
    converted_from: str = ""  # the float type of the reference, if candidates were converted to float32
    provenance: Provenance = Provenance()

    @property
    def built(self) -> int:
        """Search builds that succeeded; those of `NOT_CANDIDATES` are not counted."""
        return sum(t.ok for t in self.trials if t.phase not in NOT_CANDIDATES)

    @property
    def failed(self) -> int:
        """Search builds that failed."""
        return sum(not t.ok for t in self.trials if t.phase not in NOT_CANDIDATES)

    @property
    def total(self) -> int:
        """Search builds, failed ones too; those of `NOT_CANDIDATES` are not counted."""
        return self.built + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a search, for progress bars and heartbeat lines. ``best`` is the ratio to the reference.

    One is reported after each trial, with ``doing`` empty, and one at the beginning of each step, which ``doing``
    names. ``total`` is 0 outside the search. ``waiting`` is the reason of a wait; other fields are unknown then.
    """

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
    waiting: str = ""
    doing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockError:
    """The error of one unit of the search under a label, with all others in floating point.

    ``sqnr_db`` is that of the worst guiding tensor.
    """

    block: str
    label: str
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class LabelNoise(Mapping[tuple[str, str], float]):
    """Noise power over signal power of each (unit, label) alone, and of the parts that it consists of.

    ``powers`` is by part, a Q/DQ pair on one edge; ``parts`` has the numbers of those of each (unit, label). Labels of
    neighbouring units share the parts of the tensor between them, whose noise is there once.
    """

    powers: Sequence[float]
    parts: Mapping[tuple[str, str], tuple[int, ...]]

    def __getitem__(self, key: tuple[str, str]) -> float:
        return self.power_of(self.parts[key])

    def power_of(self, parts: Iterable[int]) -> float:
        """The noise of several parts together."""
        return math.fsum(self.powers[part] for part in parts)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionGain:
    """The gain of a correction with everything quantized: the SQNR at the worst guiding tensor on held-out samples.

    ``changed`` are the ranges, weights, biases or groups of channels that it changes. One that is not ``taken`` does
    not help enough.
    """

    name: str
    before_db: float
    after_db: float
    changed: int
    taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The error of a placement against the float model over ``samples`` inputs, computed as ONNX defines Q/DQ.

    ``outputs`` are the graph outputs. ``guiding`` are the tensors before trailing operators that select, such as an
    ArgMax, where errors of single pairs are additive. ``accuracy`` is the task metric of the case's constraint.
    """

    outputs: tuple[TensorParity, ...]
    guiding: tuple[TensorParity, ...]
    samples: int
    data: str = ""  # "evaluation", "calibration" or "random"
    accuracy: float | None = None

    @property
    def sqnr_db(self) -> float:
        """The worst graph output's SQNR in dB."""
        return min((one.sqnr_db for one in self.outputs), default=math.inf)

    @property
    def guiding_db(self) -> float:
        """The worst guiding tensor's SQNR in dB."""
        return min((one.sqnr_db for one in self.guiding), default=math.inf)

    @property
    def cosine(self) -> float:
        """The worst graph output's cosine similarity."""
        return min((one.cosine for one in self.outputs), default=1.0)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of any graph output."""
        return max((one.max_abs for one in self.outputs), default=0.0)
