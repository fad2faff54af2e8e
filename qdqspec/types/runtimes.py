"""Records of a comparison of several runtimes: the float and the tuned model of each, timed interleaved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qdqspec.types.measured import Interval, Samples
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

    ``name`` is what the cases have in common. ``reference`` is the label of the fastest float model, ``winner`` that of
    the fastest model that is accurate enough. ``seconds`` is the time that the comparison took.
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
