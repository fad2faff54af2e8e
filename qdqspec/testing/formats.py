"""The contract suite for report formats. Inherit it in a test class.

    class TestMine(FormatContract):
        report_format = my_format

pytest collects the subclass like any other test class.
"""

from __future__ import annotations

import re
from typing import ClassVar

import pytest

from qdqspec.app.report.formats import ReportFormat
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.testing.records import HOSTILE, bare_run, empty_run, hostile_run, sample_run
from qdqspec.types import RunRecord

_RUNS = {"sample": sample_run, "empty": empty_run, "bare": bare_run, "hostile": hostile_run}


class FormatContract:
    """The properties of a report that is safe to write, commit and open. Set ``binary`` for a binary format."""

    report_format: ClassVar[ReportFormat]
    binary: ClassVar[bool] = False

    def written(self, record: RunRecord) -> bytes:
        """The report as it is written."""
        content = self.report_format.render(record)
        return content.encode("utf-8") if isinstance(content, str) else content

    def rendered(self, record: RunRecord) -> str:
        """The report as text; skips a test of a binary format."""
        if self.binary:
            pytest.skip("a binary format has no text")
        return self.written(record).decode("utf-8")

    def test_suffix(self) -> None:
        """The suffix, with its dot, selects the format."""
        assert re.fullmatch(r"\.[a-z0-9]+", self.report_format.suffix)

    @pytest.mark.parametrize("name", _RUNS)
    def test_renders(self, name: str) -> None:
        """Any record gives a report: an empty one, one without measurements, one with unusual names.

        The same record gives the same bytes, also after it was written and read.
        """
        written = self.written(_RUNS[name]())
        assert written
        assert written == self.written(_RUNS[name]())
        read = record_from_json(record_to_json(_RUNS[name]()))
        again = record_from_json(record_to_json(read))
        assert self.written(read) == self.written(again)

    def test_names_every_case(self) -> None:
        """Each case is included, by its spec's name."""
        text = self.rendered(sample_run())
        assert all(case.evidence.case.spec_name in text for case in sample_run().cases)

    def test_hostile_names(self) -> None:
        """Control characters and markup in names and messages are escaped."""
        text = self.rendered(hostile_run())
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert HOSTILE not in text
