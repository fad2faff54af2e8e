"""The end of a search: the time limit of the case and that of the whole run, in one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from qdqspec._core.units import seconds_text


@dataclass(slots=True, kw_only=True)
class Deadline:
    """Ends after ``seconds``, or when ``run_left`` is 0, whichever comes first; without both, never.

    ``waited`` are the seconds that this process has spent waiting for other runs on the device: they do not count
    towards ``seconds``. ``run_left`` are the seconds left of the time limit of the run, in which they do. ``reserved``
    seconds are kept back for the steps after the search, at most half of ``seconds``.
    """

    seconds: float | None = None
    waited: Callable[[], float] = lambda: 0.0
    run_left: Callable[[], float | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    reserved: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock() - self.waited()

    @property
    def spent(self) -> float:
        """Seconds since the start, without those spent waiting."""
        return self.clock() - self.waited() - self.started

    @property
    def left(self) -> float | None:
        """Seconds left, without those reserved; ``None`` without a limit."""
        limits = [seconds for seconds in (self._own_left, self.run_left()) if seconds is not None]
        return max(0.0, min(limits)) if limits else None

    @property
    def reached(self) -> str:
        """The limit that is reached, as text; empty before."""
        own = self._own_left
        if self.seconds is not None and own is not None and own <= 0:
            return f"its limit of {seconds_text(self.seconds)}"
        return "the time limit of the run" if self.run_left() == 0 else ""

    def share(self, part: float, otherwise: float) -> float:
        """Seconds for a step: a ``part`` of the limit, or ``otherwise`` without a limit; at most what is left."""
        wanted = otherwise if self.seconds is None else part * self.seconds
        return wanted if self.left is None else min(wanted, self.left)

    def allows(self, seconds: float, *, times: float = 1.0) -> bool:
        """Whether a step of ``seconds`` ends before ``times`` the time limit of the case."""
        return self.seconds is None or self.spent + seconds <= times * self.seconds

    @property
    def _own_left(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds - min(self.reserved, self.seconds / 2) - self.spent
