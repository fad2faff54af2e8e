"""The default limits of a selected model: an SQNR on all data, and a proved gain."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of

from qdqspec.accuracy.corrections.find import FoundCorrections
from qdqspec.accuracy.gate import SAMPLES
from qdqspec.app.preparation.correcting import Correcting
from qdqspec.app.report.record import record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.session import Session, tuning
from qdqspec.search.loop import Search
from qdqspec.types import Case, Inputs, RunRecord, TuneRules

QUIET = ("fake.run_noise=0.002", "fake.wall_noise=0.002", "fake.build_noise=0.001", "fake.integer=0.8")


@pytest.fixture
def case(case: Case, project: Path) -> Case:
    images = arrays_of(project / "data.npz")["x"]
    np.savez(project / "small.npz", x=images / 1000)  # below half a quantization step of the calibrated range
    usual = np.concatenate([images] * 2)[:SAMPLES]
    np.savez(project / "late.npz", x=np.concatenate([usual, 100 * images]))  # beyond the calibrated ranges
    data = project / "data.npz"
    inputs = Inputs(calibration=data, evaluation=data)
    return replace(case, inputs=inputs, tune=TuneRules(trials=4))


def on_small_data(case: Case, name: str = "small", **tune: Any) -> Case:
    """The case with evaluation data on which candidates are inaccurate; with ``late``, only after the first samples."""
    inputs = replace(case.inputs, evaluation=case.model.parent / f"{name}.npz")
    return replace(case, inputs=inputs, tune=replace(case.tune, **tune))


def tuned(case: Case, *words: str) -> RunRecord:
    """The record of tuning the case."""
    with Session(backend="fake", root=case.model.parent, backend_option=(*QUIET, *words)) as session:
        return session.tune(case).record


def test_a_candidate_accurate_only_on_the_first_samples_is_not_selected(case: Case) -> None:
    record = tuned(on_small_data(case, "late"))
    (found,) = (one.evidence for one in record.cases)
    assert found.status == "unchanged"
    assert "the SQNR limit of 20 dB (the default)" in found.reason
    assert "reached 20 dB on the first 8 samples and" in found.reason
    assert "dB at most on all evaluation data" in found.reason
    assert f"default unchanged: {found.reason}" in summary_table(record)
    data = json.loads(json.dumps(record_to_json(record), allow_nan=False))["cases"][0]
    assert (data["status"], data["reason"]) == ("unchanged", found.reason)
    assert data["parity"] == {**data["parity"], "sqnr_db": 200.0, "cosine": 1.0, "max_abs": 0.0}


def test_min_sqnr_db_none_removes_the_limit_and_the_table_marks_the_model(case: Case) -> None:
    record = tuned(on_small_data(case, min_sqnr_db="none"))
    (found,) = (one.evidence for one in record.cases)
    assert found.status == "tuned"
    assert found.parity.sqnr_db < 20
    table = summary_table(record)
    assert f"{found.parity.sqnr_db:.1f} < 20" in table
    assert "SQNR limit: none (min_sqnr_db: none)" in table
    assert f"its SQNR of {found.parity.sqnr_db:.1f} dB is below 20 dB" in table


def test_other_evaluation_data_misses_the_cache(case: Case) -> None:
    first = tuned(case)
    assert first.cases[0].evidence.status == "tuned"
    assert "SQNR limit: 20 dB by default" in summary_table(first)
    second = tuned(on_small_data(case)).cases[0].evidence
    assert second.status == "unchanged"
    assert "at most on all evaluation data" not in second.reason, "rejected on the first samples"


@pytest.mark.parametrize("min_sqnr_db", [30.0, "none"])
def test_the_point_selected_from_a_front_meets_the_limit(case: Case, min_sqnr_db: Any) -> None:
    rules = replace(case.tune, trials=8, objective="pareto", min_sqnr_db=min_sqnr_db)
    found = tuned(replace(case, tune=rules)).cases[0].evidence
    members = {point.placement: point for point in found.search.front}
    selected = members[found.search.winner.digest]
    assert selected.sqnr_db == pytest.approx(found.parity.sqnr_db, abs=0.01)
    assert selected.sqnr_db >= (found.search.limits.min_sqnr_db or 0)
    assert [point.sqnr_db for point in found.search.front][-1] == 200.0


def test_the_time_of_corrections_is_part_of_the_search_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float | None] = []

    def slow(_: Correcting) -> FoundCorrections:
        time.sleep(0.1)
        return FoundCorrections()

    def noted(*given: Any, **more: Any) -> Search:
        search = Search(*given, **more)
        left.append(search.deadline.left)
        return search

    monkeypatch.setattr(Correcting, "find", slow)
    monkeypatch.setattr(tuning, "Search", noted)
    tuned(replace(case, tune=replace(case.tune, minutes=1)))
    assert left[0] is not None
    assert left[0] <= 60 - 0.1
