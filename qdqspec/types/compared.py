"""Records of a comparison with a committed baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from qdqspec.types.measured import Interval

BaselineState: TypeAlias = Literal["compared", "written", "missing", "unlike", "damaged", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """The change of a time, or a ratio of times, between two runs: the later over the earlier.

    ``builds`` is the 95 % interval over fresh builds. ``ranks`` are the bounds of a rank test over rounds: a
    change outside them is rejected with 1 % error on each side. ``p_value`` is that of no change.
    """

    builds: Interval
    ranks: Interval
    p_value: float


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
