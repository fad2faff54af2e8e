"""Shows the search on pytest's terminal: a live bar, or a line a minute if there is no terminal.

Both bypass pytest's capture. ``-q`` removes the bar and keeps the line, ``-qq`` removes both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qdqspec._core.progress import Display, Heartbeat, ProgressBar, can_draw
from qdqspec.app.plugin._compat import is_worker, reporter_of, uncaptured

_DISPLAY = pytest.StashKey[Display | None]()


@contextmanager
def show_progress(config: pytest.Config, session: Any) -> Iterator[None]:
    """Show the progress of ``session`` while the block runs. A session that already has an observer keeps it."""
    if _DISPLAY not in config.stash:  # one for the whole run: the interval of the heartbeat spans short cases
        config.stash[_DISPLAY] = _choose_display(config)
    display = config.stash[_DISPLAY]
    if display is None or getattr(session, "watch", display) is not None:
        yield
        return
    session.watch = display.update
    try:
        yield
    finally:
        session.watch = None
        display.close()


def _choose_display(config: pytest.Config) -> Display | None:
    verbosity, reporter, terminal = config.get_verbosity(), reporter_of(config), uncaptured(config)
    if verbosity < -1 or (reporter is None and not is_worker(config)):
        return None

    def write(line: str) -> None:
        with terminal():
            if reporter is None:  # a worker of pytest-xdist
                sys.stderr.write(f"\n{line}\n")
                sys.stderr.flush()
            else:
                reporter.ensure_newline()
                reporter.write_line(line, flush=True)

    @contextmanager
    def own_line() -> Iterator[None]:
        """End pytest's line of dots first, because the bar overwrites the current line."""
        with terminal():
            if reporter is not None:
                reporter.ensure_newline()
            yield

    if reporter is None or verbosity < 0 or not can_draw(is_terminal=reporter.isatty()):
        return Heartbeat(write)
    return ProgressBar(terminal=own_line)
