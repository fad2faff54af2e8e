"""Texts below the summary table: warnings, and sections of verdicts."""

from __future__ import annotations

from qdqspec.report.names import distinct_names
from qdqspec.types import RunRecord, Section
from qdqspec.units import list_text


def warning_lines(record: RunRecord) -> list[str]:
    """``warning: squeezenet::default: ...``, each once; a warning of several cases names the first ones."""
    cases: dict[str, list[str]] = {}
    for name, case in zip(distinct_names(record.cases), record.cases, strict=True):
        for text in case.evidence.warnings:
            cases.setdefault(text, []).append(name)
    return [f"warning: {list_text(names, 2)}: {text}" for text, names in cases.items()]


def section_text(section: Section) -> str:
    """A titled table, or titled text."""
    body = section.text
    if section.rows:
        from tabulate import tabulate

        table = str(tabulate(section.rows, headers=section.headers, disable_numparse=True))
        body = f"{table}\n{body}" if body else table
    return "\n".join((section.title, *(f"  {line}".rstrip() for line in body.splitlines())))
