"""Records and their written parts: fields are copied by name, so each part must say which it has of a record."""

from __future__ import annotations

from dataclasses import fields

import pytest

from qdqspec.report.layout import LatencyPart, ParityPart, SearchPart, TrialPart
from qdqspec.types import LatencyEvidence, ParityEvidence, SearchResult, Trial

WRITTEN_ELSEWHERE = {"samples", "speedup", "failures", "winner", "trials", "regions", "patterns", "placement"}
NOT_WRITTEN = {
    "rival",
    "graph_hash",
    "layers",
    "twin",
    "subgraph",
    "all_data_db",
    "is_part",
    "eps",
    "tested",
}


@pytest.mark.parametrize(
    ("record", "part", "left_out"),
    [
        (LatencyEvidence, LatencyPart, WRITTEN_ELSEWHERE | NOT_WRITTEN),
        (ParityEvidence, ParityPart, set()),
        (SearchResult, SearchPart, WRITTEN_ELSEWHERE),
        (Trial, TrialPart, WRITTEN_ELSEWHERE | NOT_WRITTEN),
    ],
)
def test_every_field_is_written_or_left_out_on_purpose(record, part, left_out):
    assert {each.name for each in fields(record)} - left_out <= part.model_fields.keys()
