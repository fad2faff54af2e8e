"""Records of an upgrade check: tuned models under the present and another version of a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from qdqspec.types.measured import Interval
from qdqspec.types.words import Clock

LayerChangeKind: TypeAlias = Literal["time", "precision", "fusion"]
UpgradeState: TypeAlias = Literal["ok", "slower", "slower than float", "less accurate", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """Kernels that compute the same ONNX nodes and differ between two versions, with their milliseconds.

    ``tensors`` are those that the kernels only convert. ``kinds`` states what differs; ``before`` and ``after``
    describe the kernels: operators, nodes, precision.
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
