"""Writes a run record to files, in the format that a path's suffix names.

May import floor 0 and this room. Writes beside the target and renames, so that no half report is ever read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from qdqspec import registry
from qdqspec.errors import ConfigError, OutputError
from qdqspec.report.formats.base import ReportFormat
from qdqspec.report.record import record_to_json
from qdqspec.types import RunRecord


def format_named(name: str) -> ReportFormat:
    """The format called ``name``; raises `ConfigError` with the nearest known one."""
    found = registry.resolve("format", name)
    return cast(ReportFormat, found() if isinstance(found, type) else found)


def format_for(path: Path) -> ReportFormat:
    """The format whose suffix ``path`` has; raises `ConfigError` with the suffixes there are."""
    formats = {made.suffix: made for made in map(format_named, registry.names("format"))}
    if path.suffix not in formats:
        raise ConfigError(
            f"no report format writes '{path.suffix}' files",
            where=path,
            cure=f"use one of these suffixes: {', '.join(sorted(formats))}",
        )
    return formats[path.suffix]


def write_report(record: RunRecord, path: Path) -> None:
    """Render the record and write it; raises `OutputError` where that is impossible."""
    _write(format_for(path).render(record), path)


def write_json(record: RunRecord, path: Path) -> None:
    """Write the record itself, whatever the suffix; raises `OutputError` where that is impossible."""
    _write(json.dumps(record_to_json(record), indent=1) + "\n", path)


def _write(content: str | bytes, path: Path) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        beside.replace(path)
    except OSError as error:
        raise OutputError(
            f"the report cannot be written: {error.strerror}", where=path, cure="choose another path"
        ) from None
