"""Writes ``result.json`` beside a case's models."""

from __future__ import annotations

from qdqspec.files import RESULT, write_whole
from qdqspec.report.record import case_to_json, json_text
from qdqspec.types import RunRecord


def write_results(record: RunRecord) -> None:
    """Write each case's result into its folder, which is created if an error came first.

    Raises `OutputError` if a folder cannot be written.
    """
    for case in record.cases:
        folder = case.evidence.output
        if folder is not None and (folder.is_dir() or case.results):
            write_whole(folder / RESULT, json_text(case_to_json(case)), what="the result", make_folder=True)
