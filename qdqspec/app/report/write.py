"""Writes a run's files, atomically: reports in the format of the suffix, ``result.json`` and ``tune.json``.

For GitHub Actions (``--qdq-report=github``) the page is added to the job's summary, and failed checks are annotations:
workflow commands, lines that the runner reads from the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qdqspec._core.files import RESULT, write_whole
from qdqspec._core.registry import names, resolve
from qdqspec._core.units import plain
from qdqspec.app.report.formats import ReportFormat
from qdqspec.app.report.record import case_to_json, json_text, record_from_json, record_to_json
from qdqspec.errors import ConfigError, OutputError
from qdqspec.types import RunRecord

TUNE = "tune.json"  # beside the folders of the cases
TUNE_SCHEMA_VERSION = 1
NAME = "github"
_SUMMARY, _REPOSITORY = "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"
MOST_ANNOTATIONS = 10  # of each kind that GitHub shows for a step
_LEVELS = {("error", "fail"): "error", ("warn", "fail"): "warning"}


def is_github(path: Path) -> bool:
    """Whether a report is for GitHub Actions and not a file."""
    return path.name == NAME


def annotation_lines(record: RunRecord, root: Path) -> list[str]:
    """A workflow command for each failed check, at its line of the spec; at most ten.

    Paths are relative to the checked-out repository if ``root`` is inside it, else to ``root``.
    """
    return [*_annotations(record, (Path(os.environ.get(_REPOSITORY) or root), root))][:MOST_ANNOTATIONS]


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


def append_summary(markdown: bytes) -> None:
    """Add a page to the job's summary; nothing outside GitHub Actions. Raises `OutputError` if it cannot be written."""
    path = os.environ.get(_SUMMARY, "")
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


def format_named(name: str) -> ReportFormat:
    """The format of that name, such as ``markdown``. Raises `ConfigError` with the known ones."""
    found: ReportFormat = resolve("format", name)  # type: ignore[assignment]  # the registry cannot know the seam
    return found


def format_for(path: Path) -> ReportFormat:
    """The format with the path's suffix. Raises `ConfigError` with the known ones.

    ``github`` without a suffix is Markdown for the summary of a job of GitHub Actions.
    """
    if is_github(path):
        return format_named("markdown")
    known: dict[str, ReportFormat] = {}
    for name in names("format"):
        report_format = format_named(name)
        known.setdefault(report_format.suffix, report_format)
    if path.suffix.lower() in known:
        return known[path.suffix.lower()]
    suffix = f"the suffix '{path.suffix}'" if path.suffix else "no suffix"
    raise ConfigError(
        f"no report format is known by {suffix}",
        where=path,
        cure=f"known: {', '.join(sorted(known))}, and the word {NAME}",
    )


def refuse_unknown_formats(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` for a report whose format is not known, before any work."""
    for path in paths:
        format_for(path)


def render(record: RunRecord, path: Path) -> bytes:
    """The report for that path as bytes. It shows only the content of a written record.

    So a page made during a run and one made later from the record are the same, and neither names folders of
    this machine.
    """
    text = format_for(path).render(record_from_json(record_to_json(record)))
    return text.encode("utf-8") if isinstance(text, str) else text


def write_reports(record: RunRecord, paths: Iterable[Path]) -> None:
    """Write reports; an unknown suffix is rejected before anything is written.

    Raises `OutputError` if a file cannot be written.
    """
    rendered = [(path, render(record, path)) for path in paths]
    for path, content in rendered:
        if is_github(path):
            append_summary(content)
        else:
            _write(path, content)


def write_json(record: RunRecord, path: Path) -> None:
    """Write the run record, whatever the path's suffix."""
    _write(path, json_text(record_to_json(record)))


def write_results(record: RunRecord) -> None:
    """Write each case's ``result.json`` beside its models, into its folder, which is created if an error came first.

    Comparisons of runtimes are written to ``tune.json``, in each folder that holds folders of their cases. Raises
    `OutputError` if a folder cannot be written.
    """
    for case in record.cases:
        folder = case.evidence.output
        if folder is not None and (folder.is_dir() or case.results):
            write_whole(folder / RESULT, json_text(case_to_json(case)), what="the result", make_folder=True)
    if record.runtimes:
        _write_comparisons(record)


def _write_comparisons(record: RunRecord) -> None:
    """Write the comparisons of the run record, and the file of each winner by name."""
    outputs = {case.evidence.case.name: case.evidence.output for case in record.cases}
    data = record_to_json(record)
    folders: dict[Path, tuple[list[dict[str, Any]], dict[str, str]]] = {}
    for found, comparison in zip(record.runtimes, data["runtimes"], strict=True):
        winner = found.named(found.winner)
        output = outputs.get(winner.case)
        if output is not None:
            comparisons, files = folders.setdefault(output.parent, ([], {}))
            comparisons.append(comparison)
            files[found.name] = f"{output.name}/{'tuned' if winner.model == 'tuned' else 'reference'}.onnx"
    for folder, (comparisons, files) in folders.items():
        content = {
            "schema_version": TUNE_SCHEMA_VERSION,
            "qdqspec": record.version,
            "runtimes": comparisons,
            "winners": files,
        }
        write_whole(folder / TUNE, json_text(content), what="the comparison")


def _write(path: Path, content: bytes | str) -> None:
    write_whole(path, content, what="the report", make_folder=True)
