"""What a committed baseline makes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from qdqspec.types.measured import Interval

BaselineState: TypeAlias = Literal["compared", "written", "missing", "unlike", "damaged", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a time, or a ratio of times, differs between two runs: the later over the earlier.

    ``builds`` counts fresh builds, with a 95 % interval. ``ranks`` counts rounds, as a rank test sees them:
    a change outside its bounds is rejected with 1 % error on each side. ``p_value`` is that of no change.
    """

    builds: Interval
    ranks: Interval
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFigure:
    """A ratio tuned / reference that a baseline file holds, or held before it was renewed.

    ``recorded`` is an ISO 8601 time in UTC; ``changed`` tells what was not as with the figure it replaced.
    """

    device: str
    ratio: Interval
    recorded: str = ""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionEvidence:
    """The ratio tuned / reference of this run beside the one of the baseline in ``file``.

    ``file`` is relative to the spec's folder, ``command`` writes or renews the entry, ``reason`` says why
    nothing was compared. ``looks`` is 2 where it was measured again, more closely, before judging.
    ``notes`` tell what else differs between the two runs. ``history`` are the figures of this device, the oldest
    first, the one compared with last; ``elsewhere`` those that hold on other devices.
    """

    state: BaselineState
    file: str = ""
    command: str = ""
    reason: str = ""
    required: bool = False  # a baseline that cannot be compared with is a failure
    baseline: Interval | None = None
    ratio: Interval | None = None
    change: Change | None = None
    looks: int = 1
    builds: int = 0
    recorded: str = ""
    notes: tuple[str, ...] = ()
    history: tuple[BaselineFigure, ...] = ()
    elsewhere: tuple[BaselineFigure, ...] = ()
