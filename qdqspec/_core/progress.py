"""The end of a search, and its progress as one line or as a live bar. Imports rich only for drawing.

Drawing happens inside the callback, between two measurements and never from a separate thread: a redraw
during a timed run would be measured too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from qdqspec._core.units import plain, seconds_text
from qdqspec.types import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 60.0
_BAR_WIDTH = 16


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

    def allows(self, seconds: float, *, times: float = 1.0) -> bool:
        """Whether a step of ``seconds`` ends before ``times`` the time limit of the case."""
        return self.seconds is None or self.spent + seconds <= times * self.seconds

    @property
    def _own_left(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds - min(self.reserved, self.seconds / 2) - self.spent


def can_draw(*, is_terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a bar can be drawn: on a terminal that moves its cursor, which one of type ``dumb`` does not."""
    return is_terminal and environment.get("TERM", "").lower() not in ("dumb", "unknown")


class Display(Protocol):
    """Shows progress. ``close`` restores the terminal; the display may be used again."""

    def update(self, progress: Progress) -> None:
        """Show the newest state."""

    def close(self) -> None:
        """Remove the display."""


@contextmanager
def shown_on(display: Display, session: Any) -> Iterator[None]:
    """Show the progress of a session, which it gives to its attribute ``watch``, while the block runs."""
    session.watch = display.update
    try:
        yield
    finally:
        session.watch = None
        display.close()


def _doing(progress: Progress) -> str:
    return progress.waiting or progress.doing or progress.phase


def _parts(progress: Progress, *, counts: bool = True) -> list[str]:
    """``12 of 60``, ``best 1.42x``, ``3 kept, 8 dropped, 1 undecided``, ``4 min left``: what is known of these."""
    parts = []
    if progress.total:
        parts += [f"{progress.done} of {progress.total}"]
        parts += [f"best {1 / progress.best:.2f}x"] if progress.best else []
        if counts:
            words = ("kept", "dropped", "undecided", "failed")
            parts += [f"{count} {word}" for word in words if (count := getattr(progress, word))]
    left = progress.seconds_left or 0
    return parts + ([f"{seconds_text(left, rough=True)} left"] if round(left) else [])


def bar_texts(progress: Progress, width: int) -> tuple[str, str]:
    """The texts before and after the bar, at most ``width`` characters together: the case's name is cut first."""
    after = ", ".join(_parts(progress, counts=width >= 90))
    doing = plain(_doing(progress), width - len(after) - 9)
    return f"{plain(progress.case, max(width - len(doing) - len(after) - 1, 8))} {doing}", after


def heartbeat_line(progress: Progress) -> str:
    """The line that a run without a terminal prints every minute, and the line of a wait or a step."""
    parts = _parts(progress)
    if progress.total:
        parts[0] = f"trial {parts[0]}"
    return f"[qdqspec] {progress.case}: {', '.join([_doing(progress), *parts])}"


class Heartbeat:
    """Writes one line a minute, however many updates arrive, so that a long job shows progress.

    The first step of a case and a new wait are written at once.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last = clock()
        self._lines: dict[str, str] = {}  # the last one by case

    def update(self, progress: Progress) -> None:
        """Write the state if it is new, or the last line is a minute old."""
        line, before = heartbeat_line(progress), self._lines.get(progress.case)
        is_first_step = before is None and bool(progress.doing) and not progress.total
        is_new_wait = bool(progress.waiting) and line != before
        if is_first_step or is_new_wait or self._clock() - self._last >= HEARTBEAT_SECONDS:
            self._last, self._lines[progress.case] = self._clock(), line
            self._write(line)

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""


class ProgressBar:
    """A live bar that is erased when closed. ``terminal()`` is entered around each access to the screen.

    The bar overwrites the current line of the screen; ``line()`` is the text that replaces the bar at its end.
    Without ``file`` it draws on the value of ``sys.stdout`` inside ``terminal()``.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        terminal: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        line: Callable[[], str] = str,
        colored: bool = True,
    ) -> None:
        self._line = line
        self._colored = colored
        self._file = file
        self._terminal = terminal
        self._drawn: RichProgress | None = None

    def update(self, progress: Progress) -> None:
        """Draw the newest state."""
        with self._terminal():
            if self._drawn is None:
                from rich.console import Console
                from rich.progress import BarColumn, Progress as RichProgress, TextColumn

                self._drawn = RichProgress(
                    TextColumn("{task.description}", markup=False),
                    BarColumn(bar_width=_BAR_WIDTH),
                    TextColumn("{task.fields[after]}", markup=False),
                    console=Console(file=self._file, no_color=None if self._colored else True),
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._drawn.add_task("", total=1, after="")
                print("\r\x1b[2K", end="", file=self._drawn.console.file)
                self._drawn.start()
            before, after = bar_texts(progress, self._drawn.console.width - _BAR_WIDTH - 3)
            task, total = self._drawn.task_ids[0], progress.total or 1  # rich takes None for "as before"
            self._drawn.update(task, description=before, completed=progress.done, total=total, after=after)
            self._drawn.refresh()

    def close(self) -> None:
        """Erase the bar."""
        if self._drawn is not None:
            with self._terminal():
                self._drawn.stop()
                print(self._line(), end="", file=self._drawn.console.file, flush=True)
            self._drawn = None
