"""Warnings below the summary table."""

from __future__ import annotations

from qdqspec.report.names import distinct_names
from qdqspec.types import RunRecord


def warning_lines(record: RunRecord) -> list[str]:
    """``warning: squeezenet::default: ...``, each once; a warning of several cases names the first ones."""
    cases: dict[str, list[str]] = {}
    for name, case in zip(distinct_names(record.cases), record.cases, strict=True):
        for text in case.evidence.warnings:
            cases.setdefault(text, []).append(name)
    return [f"warning: {_names(names)}: {text}" for text, names in cases.items()]


def _names(names: list[str]) -> str:
    shown = ", ".join(dict.fromkeys(names[:2]))
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown
