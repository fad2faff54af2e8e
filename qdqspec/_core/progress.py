"""Shows the progress of a search as one line or as a live bar. Imports rich only for drawing.

Drawing happens inside the callback, between two measurements and never from a separate thread: a redraw
during a timed run would be measured too.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

from qdqspec._core.units import plain, seconds_text, wrapped
from qdqspec.types import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 60.0
STEP_SECONDS = 5.0


def can_draw(*, is_terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a bar can be drawn: on a terminal that moves its cursor, which one of type ``dumb`` does not."""
    return is_terminal and environment.get("TERM", "").lower() not in ("dumb", "unknown")


class Display(Protocol):
    """Shows progress. ``close`` restores the terminal; the display may be used again."""

    def update(self, progress: Progress) -> None:
        """Show the newest state."""
        ...

    def close(self) -> None:
        """Remove the display."""
        ...


def tally(progress: Progress) -> str:
    """``best 1.42x, 3 kept, 8 dropped, 1 no difference, 4 min left``."""
    parts = [f"best {1 / progress.best:.2f}x"] if progress.best else []
    parts += [f"{progress.kept} kept, {progress.dropped} dropped, {progress.undecided} no difference"]
    parts += [f"{progress.failed} failed"] if progress.failed else []
    return ", ".join([*parts, *_left(progress)])


def _left(progress: Progress) -> list[str]:
    left = progress.seconds_left or 0
    return [f"{seconds_text(left, rough=True)} left"] if round(left) else []


def bar_texts(progress: Progress, width: int) -> tuple[str, str]:
    """The texts before and after the bar, at most ``width`` characters together: the case's name is cut first."""
    doing = progress.doing or progress.phase
    if not progress.total:
        after = "".join(_left(progress))
    elif width >= _WIDE:
        after = f"{progress.done} of {progress.total}, {tally(progress)}"
    else:
        best = [f"best {1 / progress.best:.2f}x"] if progress.best else []
        after = ", ".join([f"{progress.done} of {progress.total}", *best, *_left(progress)])
    return f"{plain(progress.case, max(width - len(doing) - len(after) - 1, 8))} {doing}", after


_WIDE = 90  # characters without the bar


def heartbeat_line(progress: Progress) -> str:
    """The line that a run without a terminal prints every minute, and the line of a wait or a step."""
    doing = progress.waiting or progress.doing or progress.phase
    if progress.waiting or not progress.total:
        return f"[qdqspec] {progress.case}: {', '.join([doing, *_left(progress)])}"
    return f"[qdqspec] {progress.case}: {doing}, trial {progress.done} of {progress.total}, {tally(progress)}"


class Heartbeat:
    """Writes one line a minute, however many updates arrive, so that a long job shows progress.

    The first step of a case is written at once, and so is a new wait; a later step outside the search if the last
    line is some seconds old. A line that repeats the last one of its case is written once a minute.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last = clock()
        self._lines: dict[str, str] = {}  # the last one by case

    def update(self, progress: Progress) -> None:
        """Write the state if it is new enough, or the last line old enough."""
        line, before = heartbeat_line(progress), self._lines.get(progress.case)
        is_step = bool(progress.doing) and not progress.total
        if line != before and (progress.waiting or (is_step and before is None)):
            pause = 0.0
        else:
            pause = STEP_SECONDS if is_step and line != before else HEARTBEAT_SECONDS
        if self._clock() - self._last >= pause:
            self._last, self._lines[progress.case] = self._clock(), line
            self._write(line)

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""


class ProgressBar:
    """A live bar that is erased when closed. ``terminal()`` is entered around each access to the screen.

    Without ``file`` it draws on the value of ``sys.stdout`` inside ``terminal()``.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        terminal: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        colored: bool = True,
    ) -> None:
        self._colored = colored
        self._file = file
        self._terminal = terminal
        self._drawn: RichProgress | None = None
        self._wait = ""  # the last one that was written

    def update(self, progress: Progress) -> None:
        """Draw the newest state; a wait is a separate line, which stays."""
        if progress.waiting:
            line = heartbeat_line(progress)
            if line == self._wait:
                return
            self.close()
            self._wait = line
            with self._terminal():
                file = self._file or sys.stdout
                file.write(f"{wrapped(line, shutil.get_terminal_size().columns)}\n")
                file.flush()
            return
        with self._terminal():
            if self._drawn is None:
                self._drawn = _rich_progress(self._file, colored=self._colored)
                self._drawn.add_task("", total=1, after="")
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
            self._drawn = None


_BAR_WIDTH = 16


def _rich_progress(file: TextIO | None, *, colored: bool) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[after]}", markup=False),
        console=Console(file=file, no_color=None if colored else True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
