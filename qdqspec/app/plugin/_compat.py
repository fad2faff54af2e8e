"""All uses of pytest beyond its documented interface, each with a fallback; no other module imports ``_pytest``."""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest


class DataModule(pytest.Module):
    """A ``pytest.Module`` over a file that is not Python, so that module-scoped fixtures work in it.

    pytest documents ``_getobj`` as "overwritten by subclasses" and has no public counterpart.
    """

    def _getobj(self) -> types.ModuleType:
        return types.ModuleType(self.path.name)


def located_text(text: str, path: Path, line: int, headline: str) -> Any:
    """A failure that prints ``text`` only, and ``headline`` alone in the summary, also under xdist.

    Only an object with ``reprcrash`` and ``reprtraceback`` is transferred whole from an xdist worker; plain
    text is repeated in full in the summary of a CI run. Without pytest's classes it is plain text.
    """
    try:
        from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback
    except ImportError:
        return text
    lines = [f"{row}\n" for row in text.splitlines()]
    body = ReprTraceback([ReprEntryNative(lines)], None, style="native")
    return ExceptionChainRepr([(body, ReprFileLocation(str(path), line, headline), None)])


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def reporter_of(config: pytest.Config) -> Any | None:
    """The terminal reporter; ``None`` under ``-p no:terminal``, and in a worker, where its output is discarded."""
    return None if is_worker(config) else config.pluginmanager.get_plugin("terminalreporter")


def columns_of(config: pytest.Config) -> int | None:
    """The width of the terminal; ``None`` if the output is no terminal."""
    reporter = reporter_of(config)
    return shutil.get_terminal_size().columns if reporter is not None and reporter.isatty() else None


def current_line(reporter: Any) -> str:
    """The text after the last line feed that pytest has written; of a text wider than the terminal, its last row."""
    text: str = getattr(getattr(reporter, "_tw", None), "_current_line", "")
    width = shutil.get_terminal_size().columns
    return text[len(text) // width * width :]


def has_collected(terminal: Any) -> bool:
    """Whether the run has seen a test or an error; true with pytest-xdist, whose controller collects nothing."""
    is_controller = terminal.config.pluginmanager.hasplugin("dsession")
    return is_controller or bool(getattr(terminal, "_numcollected", 0)) or any(terminal.stats.values())


def uncaptured(config: pytest.Config) -> Callable[[], AbstractContextManager[object]]:
    """A context in which output reaches the real terminal during a test."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    disabled = getattr(capture, "global_and_fixture_disabled", None)
    return disabled if disabled is not None else nullcontext
