"""The run record itself, as strict JSON."""

from __future__ import annotations

from qdqspec.report.record import json_text, record_to_json
from qdqspec.types import RunRecord


class JsonFormat:
    """What other programs read, and what every other report can be made from."""

    suffix = ".json"

    def render(self, record: RunRecord) -> str:
        """The record with two spaces of indent and sorted keys."""
        return json_text(record_to_json(record))


report_format = JsonFormat()
