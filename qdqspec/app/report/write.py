"""Writes a run's files, atomically: reports in the format of the suffix, ``result.json`` and ``tune.json``.

For GitHub Actions (``--qdq-report=github``) the page is added to the job's summary, and failed checks are annotations:
workflow commands, lines that the runner reads from the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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


def is_github(path: Path) -> bool:
    """Whether a report is for GitHub Actions and not a file."""
    return path.name == NAME


def annotation_lines(record: RunRecord, root: Path) -> list[str]:
    """A workflow command for each failed check, at its line of the spec; at most ten.

    Paths are relative to the checked-out repository if ``root`` is inside it, else to ``root``.
    """

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return escaped(text).replace(":", "%3A").replace(",", "%2C")

    roots, levels = (Path(os.environ.get(_REPOSITORY) or root), root), {"error": "error", "warn": "warning"}
    found = []
    for case in record.cases:
        lines = {check.id: check.line for check in case.evidence.case.checks}
        spec, where = case.evidence.case.spec, ""
        for result in case.results:
            if result.verdict.outcome != "fail":
                continue
            if spec is not None:
                near = next((spec.relative_to(one) for one in roots if spec.is_relative_to(one)), spec)
                where = f"file={value(near.as_posix())},line={lines.get(result.id, 1)},"
            title = value(f"{case.evidence.case.name}::{result.id}")
            text = escaped(plain(result.verdict.headline))
            found.append(f"::{levels[result.severity]} {where}title={title}::{text}")
    return found[:MOST_ANNOTATIONS]


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
    this machine. Raises `OutputError` for any error of the format, which may be of another package.
    """
    written, report_format = record_from_json(record_to_json(record)), format_for(path)
    try:
        text = report_format.render(written)
    except Exception as error:
        what = f"the report cannot be made: {type(error).__name__}: {error}"
        cure = f"correct {type(report_format).__name__}, or choose another suffix"
        raise OutputError(what, where=path, cure=cure) from error
    return text.encode("utf-8") if isinstance(text, str) else text


def write_reports(record: RunRecord, paths: Iterable[Path]) -> None:
    """Write reports, that for GitHub to the summary of the job; nothing outside GitHub Actions.

    An unknown suffix is rejected before anything is written. Raises `OutputError` if a file cannot be written.
    """
    rendered = [(path, render(record, path)) for path in paths]
    summary = os.environ.get(_SUMMARY, "")
    for path, content in rendered:
        if not is_github(path):
            write_whole(path, content, what="the report", make_folder=True)
        elif summary:
            try:
                with Path(summary).open("ab") as file:  # other steps write to it too
                    file.write(content + b"\n")
            except OSError as error:
                what = f"the job's summary cannot be written: {error.strerror}"
                raise OutputError(what, where=summary) from None


def write_json(record: RunRecord, path: Path) -> None:
    """Write the run record, whatever the path's suffix."""
    write_whole(path, json_text(record_to_json(record)), what="the report", make_folder=True)


def write_results(record: RunRecord) -> None:
    """Write each case's ``result.json`` beside its models, into its folder, which is created if an error came first.

    Comparisons of runtimes are written to ``tune.json``, with the file of each winner by name, in each folder that
    holds folders of their cases. Raises `OutputError` after the others if a folder cannot be written.
    """
    errors: list[OutputError] = []
    for case in record.cases:
        folder = case.evidence.output
        if folder is not None and (folder.is_dir() or case.results):
            try:
                write_whole(
                    folder / RESULT, json_text(case_to_json(case)), what="the result", make_folder=True
                )
            except OutputError as error:
                errors.append(error)
    outputs = {case.evidence.case.name: case.evidence.output for case in record.cases}
    written = record_to_json(record)["runtimes"] if record.runtimes else ()
    folders: dict[Path, tuple[list[dict[str, Any]], dict[str, str]]] = {}
    for found, comparison in zip(record.runtimes, written, strict=True):
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
    if errors:
        raise errors[0]
