"""The patterns of a spec: all invalid ones are reported together, at their places in the file."""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec.errors import PatternError
from qdqspec.graph.regions.expressions import parse
from qdqspec.spec.problems import Problem, source_lines, spec_error
from qdqspec.types import Case


def require_patterns(case: Case) -> None:
    """Raise `SpecError` listing every invalid pattern, with a caret under it."""
    wrong: list[PatternError] = []
    for text in (*case.patterns.allow, *case.patterns.deny):
        try:
            parse(text)
        except PatternError as error:
            wrong.append(error)
    if not wrong:
        return
    lines: Sequence[str] = ()
    if case.spec is not None and case.spec.suffix != ".py" and case.spec.is_file():
        lines = source_lines(case.spec.read_text(encoding="utf-8", errors="replace"))
    problems = [problem for error in wrong if (problem := _problem(error, lines))]
    if case.spec is None or len(problems) < len(wrong):
        raise wrong[0]  # defined in Python, or escaped in YAML: the error's own caret is used
    raise spec_error(problems, lines, str(case.spec))


def _problem(error: PatternError, lines: Sequence[str]) -> Problem | None:
    """The line and column of a pattern; ``None`` if no line contains it verbatim."""
    for number, line in enumerate(lines, 1):
        if (at := line.find(error.text)) >= 0:
            message = f"{error.what.removesuffix(', in the pattern')}, in the pattern '{error.text}'"
            return Problem(line=number, column=at + error.column, message=message)
    return None
