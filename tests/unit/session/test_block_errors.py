"""The error of single blocks: rehearsed in a search that accuracy limits, kept with its result and in records."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec.report.record import case_from_json, case_to_json
from qdqspec.session import Session
from qdqspec.types import CaseRecord

pytestmark = pytest.mark.usefixtures("engine_threads")


def test_a_search_with_a_limit_knows_the_error_of_each_block(models: Path, tmp_path: Path) -> None:
    data = models.parent / "data" / "digits_calibration.npz"
    asked = {"calibration": data, "min_sqnr_db": 45, "trials": 4, "corrections": "none"}
    with Session(output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        result = session.tune(models / "digits_resnet.onnx", **asked)
        units = {unit.id for unit in session.work(result.evidence.case).bench.prepared.space.units}
    errors = result.search.errors
    assert errors
    assert {error.block for error in errors} <= units
    assert [error.sqnr_db for error in errors] == sorted(error.sqnr_db for error in errors)
    found = case_from_json(case_to_json(CaseRecord(evidence=result.evidence))).evidence.search
    assert found is not None
    assert found.errors == errors
    with Session(output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        again = session.tune(models / "digits_resnet.onnx", **asked).search
    assert again.provenance.source == "cached"
    assert again.errors == errors
