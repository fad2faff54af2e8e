"""Writes a run's files, atomically: reports in the format of the suffix, ``result.json`` and ``tune.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qdqspec.errors import ConfigError
from qdqspec.files import RESULT, write_whole
from qdqspec.registry import names, resolve
from qdqspec.report.formats.base import ReportFormat
from qdqspec.report.github import NAME, append_summary, is_github
from qdqspec.report.record import case_to_json, json_text, record_from_json, record_to_json
from qdqspec.report.runtimes import TUNE, tune_to_json
from qdqspec.types import RunRecord


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


def write_report(record: RunRecord, path: Path) -> None:
    """Write one report. Raises `OutputError` if the file cannot be written."""
    _write(path, render(record, path))


def write_reports(record: RunRecord, paths: Iterable[Path]) -> None:
    """Write several reports; an unknown suffix is rejected before anything is written."""
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

    Raises `OutputError` if a folder cannot be written.
    """
    for case in record.cases:
        folder = case.evidence.output
        if folder is not None and (folder.is_dir() or case.results):
            write_whole(folder / RESULT, json_text(case_to_json(case)), what="the result", make_folder=True)


def write_comparisons(record: RunRecord) -> None:
    """Write the comparisons of runtimes to ``tune.json``, in each folder that holds folders of their cases.

    Raises `OutputError` if a folder cannot be written.
    """
    outputs = {case.evidence.case.name: case.evidence.output for case in record.cases}
    data = record_to_json(record)
    written = data["runtimes"]
    folders: dict[Path, tuple[list[dict[str, Any]], dict[str, str]]] = {}
    for found, comparison in zip(record.runtimes, written, strict=True):
        winner = found.named(found.winner)
        output = outputs.get(winner.case)
        if output is not None:
            comparisons, files = folders.setdefault(output.parent, ([], {}))
            comparisons.append(comparison)
            files[found.name] = f"{output.name}/{'tuned' if winner.model == 'tuned' else 'reference'}.onnx"
    for folder, (comparisons, files) in folders.items():
        common = [each for each in data["common"] if each["name"] in files]
        text = json_text(tune_to_json(record.version, comparisons, files, common))
        write_whole(folder / TUNE, text, what="the comparison")


def _write(path: Path, content: bytes | str) -> None:
    write_whole(path, content, what="the report", make_folder=True)
