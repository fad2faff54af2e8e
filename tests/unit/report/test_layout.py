"""The written parts of records have the fields of these by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from qdqspec.report.record import LatencyPart, ParityPart, RecordPart, SearchPart, TrialPart, written
from qdqspec.types import LatencyEvidence, ParityEvidence, SearchResult, Site, Trial

TRIAL = {
    "samples",
    "rival",
    "graph_hash",
    "layers",
    "twin",
    "subgraph",
    "all_data_db",
    "is_part",
    "eps",
}


@pytest.mark.parametrize(
    ("record", "part", "left_out"),
    [
        (LatencyEvidence, LatencyPart, {"samples", "speedup", "failures", "tested"}),
        (ParityEvidence, ParityPart, set()),
        (SearchResult, SearchPart, {"winner", "trials", "regions", "patterns"}),
        (Trial, TrialPart, TRIAL),
    ],
)
def test_every_field_is_written_or_left_out_on_purpose(record, part, left_out):
    assert record.__dataclass_fields__.keys() - part.model_fields.keys() == left_out


def test_a_new_field_of_a_record_is_written_and_one_that_is_computed_is_not() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Weighed(Site):
        grams: float = 1.5

    @written(Weighed, "axis")
    class Part(RecordPart):
        """A site."""

    found = Part.model_validate(Weighed(tensor="x", consumers=(), format="int8", grams=2.0))
    assert found.model_dump()["grams"] == 2.0
    assert not {"axis", "row"} & Part.model_fields.keys()
    assert (
        Part.model_validate({"tensor": "x", "consumers": (), "format": "int8"}).model_dump()["grams"] == 1.5
    )
