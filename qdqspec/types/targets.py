"""Records of one placement for several runtimes."""

from __future__ import annotations

from dataclasses import dataclass

from qdqspec.types.measured import Interval
from qdqspec.types.words import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """The common placement on one runtime. ``weight`` is the runtime's share in the objective.

    ``ratio`` is the time of the common placement over that of the float model, ``own`` that of the best model of the
    search on this runtime alone, which built ``own_builds`` candidates; ``loss`` is the common placement over that.
    """

    case: str
    target: str
    weight: float
    ratio: Interval
    own: Interval
    loss: Interval
    own_builds: int
    own_unchanged: bool
    sqnr_db: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPlacement:
    """The placement with the least weighted geometric mean of ratios that is slower than float on no runtime.

    ``mean`` is that mean. Without a placement (``unchanged``) it is 1, and ``reason`` states why. ``origin`` is the
    runtime in whose search space it was made, ``candidates`` the number of those that were timed on all runtimes.
    """

    name: str
    clock: Clock
    builds: int
    targets: tuple[TargetResult, ...]
    mean: Interval
    unchanged: bool
    reason: str
    placement: str = ""
    pairs: int = 0
    origin: str = ""
    candidates: int = 0
    seconds: float = 0.0
