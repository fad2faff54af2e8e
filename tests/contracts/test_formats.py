from __future__ import annotations

import pytest

from qdqspec._core.registry import names
from qdqspec.app.report.write import format_named
from qdqspec.testing.formats import FormatContract
from qdqspec.testing.records import empty_run, hostile_run, sample_run

RUNS = {"sample": sample_run, "empty": empty_run, "hostile": hostile_run}


class TestMarkdown(FormatContract):
    report_format = format_named("markdown")


class TestJson(FormatContract):
    report_format = format_named("json")


class TestCsv(FormatContract):
    report_format = format_named("csv")


class TestHtml(FormatContract):
    report_format = format_named("html")


def test_every_format_has_a_contract() -> None:
    suites = (suite for suite in FormatContract.__subclasses__() if "report_format" in vars(suite))
    assert {format_named(name).suffix for name in names("format")} <= {s.report_format.suffix for s in suites}


@pytest.mark.parametrize("name", ["markdown", "json", "csv", "html"])
@pytest.mark.parametrize("run", RUNS)
def test_the_pages_of_report_formats(name: str, run: str, golden) -> None:
    report_format = format_named(name)
    content = report_format.render(RUNS[run]())
    assert isinstance(content, str)
    golden(f"report/{run}{report_format.suffix}", content)
