"""Shows the progress of a search as one line or as a live bar. Imports rich only for drawing.

Drawing happens inside the callback, between two measurements and never from a separate thread: a redraw
during a timed run would be measured too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

from qdqspec.types import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 60.0


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
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return ", ".join(parts)


def heartbeat_line(progress: Progress) -> str:
    """The line that a run without a terminal prints every minute, and the line of a wait."""
    if progress.waiting:
        return f"[qdqspec] {progress.case}: {progress.waiting}"
    return f"[qdqspec] {progress.case}: {progress.phase}, trial {progress.done} of {progress.total}, {tally(progress)}"


def duration(seconds: float) -> str:
    """``40 s``, ``4 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Heartbeat:
    """Writes one line a minute, however many updates arrive, so that the job does not look stuck."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last = clock()

    def update(self, progress: Progress) -> None:
        """Write the state if the last line is old enough; a wait at once."""
        if progress.waiting:
            self._write(heartbeat_line(progress))
        elif self._clock() - self._last >= HEARTBEAT_SECONDS:
            self._last = self._clock()
            self._write(heartbeat_line(progress))

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""


class Bar:
    """A live bar that is erased when closed. ``terminal()`` is entered around each access to the screen.

    Without ``file`` it draws on the value of ``sys.stdout`` inside ``terminal()``.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        terminal: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._file = file
        self._terminal = terminal
        self._drawn: RichProgress | None = None

    def update(self, progress: Progress) -> None:
        """Draw the newest state; a wait is a separate line, which stays."""
        if progress.waiting:
            self.close()
            with self._terminal():
                file = self._file or sys.stdout
                file.write(f"{heartbeat_line(progress)}\n")
                file.flush()
            return
        with self._terminal():
            if self._drawn is None:
                self._drawn = _rich_progress(self._file)
                self._drawn.add_task("", total=None, tally="")
                self._drawn.start()
            self._drawn.update(
                self._drawn.task_ids[0],
                description=f"{progress.case} {progress.phase}",
                completed=progress.done,
                total=progress.total,
                tally=tally(progress),
            )
            self._drawn.refresh()

    def close(self) -> None:
        """Erase the bar."""
        if self._drawn is not None:
            with self._terminal():
                self._drawn.stop()
            self._drawn = None


def _rich_progress(file: TextIO | None) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tally]}", markup=False),
        console=Console(file=file),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
