"""A case whose checks raised an error before the search is in every report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqspec.app.report.tables import summary_table
from qdqspec.app.report.write import format_named
from qdqspec.checks.verdicts import raised
from qdqspec.errors import DataError
from qdqspec.testing.records import faster_case
from qdqspec.types import Evidence, RunRecord

ERROR = DataError("metric 'mine' raised KeyError", where="data.npz", cure="it is called with outputs by name")


@pytest.fixture
def record() -> RunRecord:
    case = faster_case()
    known = case.evidence
    bare = Evidence(
        case=known.case,
        backend=known.backend,
        target=known.target,
        device=known.device,
        model_sha256=known.model_sha256,
    )
    failed = replace(case.results[0], verdict=raised(ERROR))
    found = replace(case, evidence=bare, results=(failed,))
    return RunRecord(version="0.1.0", started="2026-01-01T00:00:00+00:00", seconds=1.0, cases=(found,))


@pytest.mark.parametrize("name", ["markdown", "html", "json"])
def test_every_report_format_has_the_error_of_a_case_without_a_search(record: RunRecord, name: str) -> None:
    text = str(format_named(name).render(record))
    assert "not judged: metric" in text
    assert "it is called with outputs by name" in text


def test_the_summary_and_the_csv_count_a_case_without_a_search(record: RunRecord) -> None:
    assert "latency FAIL" in summary_table(record)
    head, row = str(format_named("csv").render(record)).splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["checks_failed"] == "1"
