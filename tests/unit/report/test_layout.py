"""The serialized parts of records have the fields of the records."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from qdqspec.app.report.record import LatencyPart, ParityPart, RecordPart, SearchPart, TrialPart, written
from qdqspec.types import LatencyEvidence, ParityEvidence, SearchResult, Site, Trial

TRIAL = {
    "samples",
    "rival",
    "graph_hash",
    "layers",
    "subgraph",
    "all_data_db",
    "is_part",
    "eps",
}


@pytest.mark.parametrize(
    ("record", "part", "left_out"),
    [
        (LatencyEvidence, LatencyPart, {"samples", "speedup", "failures"}),
        (ParityEvidence, ParityPart, set()),
        (SearchResult, SearchPart, {"winner", "trials", "regions", "patterns"}),
        (Trial, TrialPart, TRIAL),
    ],
)
def test_every_field_is_serialized_except_listed_ones(record, part, left_out):
    assert record.__dataclass_fields__.keys() - part.model_fields.keys() == left_out


def test_new_fields_of_a_record_are_serialized_and_computed_ones_are_not() -> None:
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
