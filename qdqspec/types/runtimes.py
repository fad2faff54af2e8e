"""Records of comparisons of several runtimes, and of two versions of one (upgrade check).

The float and the tuned model are timed interleaved under each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from qdqspec.types.measurement import Interval, Samples
from qdqspec.types.words import Clock


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

    @property
    def may_win(self) -> bool:
        """Whether it was timed and is accurate enough."""
        return self.ratio is not None and self.limit_db is None


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
            and model.may_win
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
