"""Renders sections of verdicts as text."""

from __future__ import annotations

from qdqspec.types import Section


def section_text(section: Section) -> str:
    """A titled table, or titled text."""
    body = section.text
    if section.rows:
        from tabulate import tabulate

        table = str(tabulate(section.rows, headers=section.headers, disable_numparse=True))
        body = f"{table}\n{body}" if body else table
    return "\n".join((section.title, *(f"  {line}".rstrip() for line in body.splitlines())))
