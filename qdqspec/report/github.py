"""Output for GitHub Actions, chosen with ``--qdq-report=github``: annotations, and the job's summary.

Annotations are workflow commands, lines that the runner reads from the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qdqspec.errors import OutputError
from qdqspec.types import RunRecord
from qdqspec.units import plain

NAME = "github"
_SUMMARY, _REPOSITORY = "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"
_MOST = 10  # of each kind that GitHub shows for a step
_LEVELS = {("error", "fail"): "error", ("warn", "fail"): "warning"}


def is_github(path: Path) -> bool:
    """Whether a report is for GitHub Actions and not a file."""
    return path.name == NAME


def annotation_lines(record: RunRecord, root: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """A workflow command for each check that failed, at its line of the spec; at most ten.

    Paths are relative to the checked-out repository, of which ``root`` may be a folder; to ``root`` outside it.
    """
    return [*_annotations(record, (Path(environment.get(_REPOSITORY) or root), root))][:_MOST]


def _annotations(record: RunRecord, roots: Sequence[Path]) -> Iterator[str]:
    for case in record.cases:
        lines = {check.id: check.line for check in case.evidence.case.checks}
        spec = case.evidence.case.spec
        for result in case.results:
            level = _LEVELS.get((result.severity, result.verdict.outcome))
            if level is None:
                continue
            title = _value(f"{case.evidence.case.name}::{result.id}")
            where = (
                "" if spec is None else f"file={_value(_near(spec, roots))},line={lines.get(result.id, 1)},"
            )
            yield f"::{level} {where}title={title}::{_escaped(plain(result.verdict.headline))}"


def append_summary(markdown: bytes, environment: Mapping[str, str] = os.environ) -> None:
    """Add a page to the job's summary; nothing outside GitHub Actions. Raises `OutputError` if it cannot be written."""
    path = environment.get(_SUMMARY, "")
    if not path:
        return
    try:
        with Path(path).open("ab") as file:  # other steps write to it too
            file.write(markdown + b"\n")
    except OSError as error:
        raise OutputError(f"the job's summary cannot be written: {error.strerror}", where=path) from None


def _near(path: Path, roots: Sequence[Path]) -> str:
    return next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path).as_posix()


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
