"""The error of single blocks: measured in searches with an accuracy limit and stored in results and records."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from qdqspec.app.report.facts import errors_table
from qdqspec.app.session import Session, pipeline


@pytest.fixture(autouse=True)
def _same_search(fast_integers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that build the same placements, and have time for the error of each block, on any machine."""
    monkeypatch.setattr(pipeline, "_result", partial(pipeline._result, errors_share=1e3))


def asked(models: Path, **more: object) -> dict[str, object]:
    data = models.parent / "data" / "digits_calibration.npz"
    return {"calibration": data, "corrections": "none", **more}


def test_a_search_with_a_limit_has_the_error_of_each_block(models: Path, tmp_path: Path) -> None:
    words = asked(models, min_sqnr_db=45, trials=4)
    with Session(output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        result = session.tune(models / "digits_resnet.onnx", **words)
        units = {unit.id for unit in session.work(result.evidence.case).prepared.space.units}
    errors = result.search.errors
    assert errors
    assert {error.block for error in errors} <= units
    assert [error.sqnr_db for error in errors] == sorted(error.sqnr_db for error in errors)
    with Session(output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        again = session.tune(models / "digits_resnet.onnx", **words).search
    assert again.provenance.source == "cached"
    assert again.errors == errors


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"min_sqnr_db": "none"}, "neither an accuracy constraint"),
        ({"min_sqnr_db": 1, "exclude": ["*"]}, "no block can be quantized"),
        ({"min_sqnr_db": 1, "backend": "fake"}, "simulated"),
        ({"min_sqnr_db": 1}, "the search's time was over"),
    ],
)
def test_errors_of_blocks_are_missing_with_a_reason(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], why: str
) -> None:
    monkeypatch.setattr(pipeline, "_result", partial(pipeline._result, errors_share=0.0))
    backend = {"backend": more.pop("backend")} if "backend" in more else {}
    with Session(output=tmp_path / "out", no_cache=True, **backend) as session:
        found = session.tune(models / "digits_resnet.onnx", **asked(models, trials=2, **more)).search
    assert why in str(errors_table(found).rows)
