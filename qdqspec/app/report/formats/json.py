"""The run record as strict JSON."""

from __future__ import annotations

from qdqspec.app.report.record import json_text, record_to_json
from qdqspec.types import RunRecord


class JsonFormat:
    """The record that other programs read, and from which each other report can be made."""

    suffix = ".json"

    def render(self, record: RunRecord) -> str:
        """The record with two spaces of indent and sorted keys."""
        return json_text(record_to_json(record))


report_format = JsonFormat()
