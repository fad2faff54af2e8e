"""Report formats, one file each, found by name: a run record in, text or bytes out."""

from __future__ import annotations

from typing import Protocol

from qdqspec.types import RunRecord


class ReportFormat(Protocol):
    """Renders a record. Pure: the same record gives the same bytes."""

    suffix: str  # with the dot; selects the format of --qdq-report=PATH

    def render(self, record: RunRecord) -> str | bytes:
        """Return the whole report."""
        ...
