"""Shows the search on pytest's terminal: a live bar, or a line a minute if there is no terminal.

Both bypass pytest's capture. ``-q`` removes the bar and keeps the line, ``-qq`` removes both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from qdqspec.plugin._compat import is_worker, reporter_of, uncaptured
from qdqspec.progress import Display, Heartbeat, ProgressBar, can_draw

_DISPLAY = pytest.StashKey[Display | None]()


@contextmanager
def shown(config: pytest.Config, session: Any) -> Iterator[None]:
    """Show the progress of ``session`` while the block runs. A session that already has an observer keeps it."""
    display = _display(config)
    if display is None or getattr(session, "watch", display) is not None:
        yield
        return
    session.watch = display.update
    try:
        yield
    finally:
        session.watch = None
        display.close()


def _display(config: pytest.Config) -> Display | None:
    """One display for the whole run, so that the heartbeat interval spans short cases."""
    if _DISPLAY not in config.stash:
        config.stash[_DISPLAY] = _choose(config)
    return config.stash[_DISPLAY]


def _choose(config: pytest.Config) -> Display | None:
    verbosity = config.get_verbosity()
    reporter = reporter_of(config)
    if verbosity < -1 or (reporter is None and not is_worker(config)):
        return None
    if reporter is None:
        return Heartbeat(_to_stderr(uncaptured(config)))
    if verbosity < 0 or not can_draw(is_terminal=reporter.isatty()):
        return Heartbeat(_to_reporter(reporter, uncaptured(config)))
    return ProgressBar(terminal=_own_line(reporter, uncaptured(config)))


_Terminal = Callable[[], AbstractContextManager[object]]


def _to_stderr(terminal: _Terminal) -> Callable[[str], None]:
    """Write to standard error: a worker of pytest-xdist has no terminal."""

    def write(line: str) -> None:
        with terminal():
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()

    return write


def _to_reporter(reporter: Any, terminal: _Terminal) -> Callable[[str], None]:
    def write(line: str) -> None:
        with terminal():
            reporter.ensure_newline()
            reporter.write_line(line, flush=True)

    return write


def _own_line(reporter: Any, terminal: _Terminal) -> _Terminal:
    """End pytest's line of dots first, because the bar overwrites the current line."""

    @contextmanager
    def entered() -> Iterator[None]:
        with terminal():
            reporter.ensure_newline()
            yield

    return entered
