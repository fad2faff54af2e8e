"""Problems of a spec, each with the source line and a caret."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqspec._core.units import plain
from qdqspec.errors import SpecError

MAX_PROBLEMS = 20
MAX_MESSAGE = 200  # characters; keys, tags and values in it may be long
_MAX_WIDTH = 100  # of a source line; a longer one is cut around the caret
_LINE_BREAK = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem and its position: ``line`` and ``column`` count from 1, ``width`` is the caret's.

    ``hint`` is written beside the caret, ``note`` on a separate line.
    """

    line: int
    column: int
    message: str
    width: int = 1
    hint: str = ""
    note: str = ""


def source_lines(text: str) -> list[str]:
    """The lines as the YAML reader counts them; ``str.splitlines`` knows more kinds of line break."""
    return _LINE_BREAK.split(text)


def excerpt(path: Path, line: int, column: int | None = None) -> str:
    """Number the lines of a file around ``line``, with a caret below the column; empty if it can no longer be read."""
    try:
        lines = source_lines(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    if len(lines) > line and not lines[-1]:  # the text after the last line end is not a line
        lines.pop()
    return "\n".join(numbered(lines, line, column, after=1))


def numbered(
    lines: Sequence[str],
    line: int,
    column: int | None = None,
    *,
    width: int = 1,
    hint: str = "",
    after: int = 0,
) -> list[str]:
    """Source lines around ``line``, each with its number, and a line with a caret if a column is given."""
    line = min(max(line, 1), len(lines))
    shown = range(max(line - 1, 1), min(line + after, len(lines)) + 1)
    gutter = len(str(shown[-1])) + 3
    long, start = len(lines[line - 1]), 0
    if long > _MAX_WIDTH:  # cut so that the column is visible
        start = max(0, min((column or 1) - _MAX_WIDTH // 2, long - _MAX_WIDTH))
    rows = []
    for number in shown:
        rows.append(f"{number:>{gutter}} | {_visible(lines[number - 1], start)}".rstrip())
        if number == line and column is not None:
            indent = " " * (column - 1 - start)
            room = min(len(lines[line - 1].rstrip()), start + _MAX_WIDTH) - column + 1
            carets = "^" * max(1, min(width, room))
            rows.append(f"{'':>{gutter}} | {indent}{carets} {hint}".rstrip())
    return rows


def spec_error(problems: Sequence[Problem], lines: Sequence[str], name: str) -> SpecError:
    """All problems of the file ``name`` as one error, by position; the first line is a complete message."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: (p.line, p.column))
    count = f" (first of {len(ordered)} problems)" if len(ordered) > 1 else ""
    rows = [plain(ordered[0].message, MAX_MESSAGE) + count]
    for number, problem in enumerate(ordered[:MAX_PROBLEMS]):
        if number:
            rows.append(f"{name}:{problem.line}:{problem.column}: {plain(problem.message, MAX_MESSAGE)}")
        rows += numbered(lines, problem.line, problem.column, width=problem.width, hint=problem.hint)
        rows += [f"   {problem.note}"] if problem.note else []
    if len(ordered) > MAX_PROBLEMS:
        rows.append(f"and {len(ordered) - MAX_PROBLEMS} more")
    error = SpecError("\n".join(rows), where=f"{name}:{ordered[0].line}:{ordered[0].column}")
    error.problems = tuple((p.line, p.column, plain(p.message, MAX_MESSAGE)) for p in ordered)
    return error


def _visible(line: str, start: int) -> str:
    """The line with one column per character, so that the caret is at the right position."""
    cut = line[start : start + _MAX_WIDTH]
    return "".join(ch if ch.isprintable() else " " if ch == "\t" else "?" for ch in cut)
