"""Converts verdicts and errors to the text that pytest prints. Text only; libraries load after a failure.

The first line is a complete verdict, because pytest's summary and CI annotations show nothing else; the last
lines are the command to reproduce it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from qdqspec.config import Settings
from qdqspec.errors import QdqspecError, SpecError
from qdqspec.plugin._compat import located_text
from qdqspec.report.terminal import fitted
from qdqspec.types import Case, CheckSpec, Verdict


class CheckFailed(Exception):  # noqa: N818 - it is a verdict, not a malfunction
    """A check failed. ``text`` is the whole text for the user, its first line the verdict."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text.splitlines()[0])


class VerdictWarning(pytest.PytestWarning):
    """A check of ``severity: warn`` failed."""

    __module__ = "qdqspec"


def failure_text(
    verdict: Verdict, case: Case, check: CheckSpec, command: str, folder: Path | None = None
) -> str:
    """Headline, tables, advice, the place in the spec, and the command that reproduces it."""
    from qdqspec.report.tables import section_text

    parts = [verdict.headline, *(section_text(section) for section in verdict.sections)]
    parts += [verdict.advice] if verdict.advice else []
    parts += [spec_excerpt(case.spec, check.line)] if case.spec and case.spec.suffix != ".py" else []
    parts += [f"Models and measurements: {folder}"] if folder is not None else []
    parts.append(f"Reproduce with:\n  {command}")
    return "\n\n".join(part.rstrip("\n") for part in parts)


def spec_excerpt(path: Path, line: int) -> str:
    """The lines of the spec that define a check, with a caret; only the position if the file is gone."""
    from qdqspec.spec.problems import excerpt

    return f"Asked for in {path.name}:{line}\n{excerpt(path, line, _column(path, line))}"


def _column(path: Path, line: int) -> int | None:
    """The column of the check: after the indent and the dash of the list."""
    try:
        text = path.read_text(encoding="utf-8").splitlines()[line - 1]
    except (OSError, UnicodeDecodeError, IndexError):
        return None
    return len(text) - len(text.lstrip(" -")) + 1


def reproduction(item: pytest.Item, settings: Settings, scheme: str | None) -> str:
    """The command line that judges this check of this placement again."""
    file = os.path.relpath(item.path, item.config.invocation_params.dir)
    # By names, not by node id: pytest-xdist appends its group to the id.
    names = [node.name for node in item.listchain() if item.path == node.path][1:]
    words = ["pytest", "::".join((file, *names))]
    words += [f"--qdq-scheme={scheme}"] if scheme else []
    return shlex.join([*words, f"--qdq-seed={settings.seed}", *settings.device_words])


def without_traceback(error: BaseException, path: Path, line: int, width: int | None) -> Any | None:
    """The text for a verdict or an input error, within ``width``; ``None`` for a bug, which keeps its traceback."""
    if not isinstance(error, CheckFailed | QdqspecError):
        return None
    text = error.text if isinstance(error, CheckFailed) else str(error)
    shown = text if width is None else fitted(text, width)
    # The place of a check is before it; that in a spec is more exact.
    headline = str(error) if isinstance(error, CheckFailed | SpecError) else error.what
    return located_text(shown, path, line, headline.splitlines()[0])
