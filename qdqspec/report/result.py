"""Writes ``result.json`` beside a case's models, and ``tune.json`` beside the folders of cases on several runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdqspec.files import RESULT, write_whole
from qdqspec.report.record import case_to_json, json_text, record_to_json
from qdqspec.report.runtimes import TUNE, tune_to_json
from qdqspec.types import RunRecord


def write_results(record: RunRecord) -> None:
    """Write each case's result into its folder, which is created if an error came first.

    Raises `OutputError` if a folder cannot be written.
    """
    for case in record.cases:
        folder = case.evidence.output
        if folder is not None and (folder.is_dir() or case.results):
            write_whole(folder / RESULT, json_text(case_to_json(case)), what="the result", make_folder=True)


def write_comparisons(record: RunRecord) -> None:
    """Write the comparisons of runtimes of each folder that holds folders of their cases.

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
