"""Limits of a selected model by default: an SQNR on all data, a proved gain, however early the search ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of

from qdqspec.accuracy.evaluator import SAMPLES
from qdqspec.app.report.record import record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, RunRecord, SearchResult, TuneRules

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


def tuned(case: Case) -> RunRecord:
    """The record of tuning the case."""
    with Session(backend="fake", root=case.model.parent, backend_option=QUIET) as session:
        return session.tune(case).record


def test_a_candidate_accurate_only_on_the_first_samples_is_not_selected(case: Case) -> None:
    record = tuned(on_small_data(case, "late"))
    (found,) = (one.evidence for one in record.cases)
    assert found.status == "unchanged"
    assert "the SQNR limit of 20 dB (the default)" in found.reason
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


@pytest.mark.parametrize("min_sqnr_db", [30.0, "none"])
def test_the_point_selected_from_a_front_meets_the_limit(case: Case, min_sqnr_db: Any) -> None:
    rules = replace(case.tune, trials=8, objective="pareto", min_sqnr_db=min_sqnr_db)
    found = tuned(replace(case, tune=rules)).cases[0].evidence
    members = {point.placement: point for point in found.search.front}
    selected = members[found.search.winner.digest]
    assert selected.sqnr_db == pytest.approx(found.parity.sqnr_db, abs=0.01)
    assert selected.sqnr_db >= (found.search.limits.min_sqnr_db or 0)
    assert [point.sqnr_db for point in found.search.front][-1] == 200.0


# ---- a budget for the reference only: full quantization is confirmed beside it ---------------------


@pytest.fixture
def short(case: Case) -> Case:
    return replace(case, tune=TuneRules(trials=1))


def searched(case: Case, **words: Any) -> tuple[SearchResult, dict[str, dict[str, Any]]]:
    """The result of the search, and the journal entries of the confirmation by role."""
    root = case.model.parent
    with Session(backend="fake", root=root, output=Path("out"), backend_option=QUIET, **words) as session:
        result = session.search(case)
        journal = session.output(case) / "trials.jsonl"
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return result, {line["role"]: line for line in lines if line["phase"] == "confirm"}


def test_full_quantization_is_confirmed_and_selected_if_proved(short: Case) -> None:
    result, confirmed = searched(short)
    assert [trial.placement.sites for trial in result.trials if trial.phase != "confirm"] == [frozenset()]
    assert confirmed.keys() == {"reference", "winner", "everything"}
    assert confirmed["everything"]["ratio"] < 0.95
    assert result.winner.digest == confirmed["everything"]["placement"]
    assert not result.unchanged


def test_full_quantization_selected_without_a_trial_is_cached_and_reusable(short: Case) -> None:
    """It is read from the cache, selected by its digest, and a seed of the next search by ``patterns.yaml``."""
    first, _ = searched(short)
    assert first.total == 1, "its profile is no candidate of the search"
    output = short.model.parent / "out" / "chain" / "default"
    _, *rows = (output / "layers.csv").read_text().splitlines()
    assert {row.partition(",")[0] for row in rows} == {"reference", "tuned"}
    again, _ = searched(short)
    assert again.provenance.source == "cached"
    assert again.winner == first.winner
    assert again.winner.labels == first.winner.labels
    named, _ = searched(short, scheme=first.winner.digest[:8])
    assert named.winner == first.winner
    rules = TuneRules(trials=2, start_from=(output / "patterns.yaml",))
    sister, _ = searched(replace(short, tune=rules))
    assert first.winner in [trial.placement for trial in sister.trials]


@pytest.mark.parametrize(("least", "unchanged"), [(5.0, False), (90.0, True)])
def test_the_sqnr_of_full_quantization_without_a_trial_is_measured_before_selection(
    short: Case, least: float, unchanged: bool
) -> None:
    result, confirmed = searched(replace(short, tune=replace(short.tune, min_sqnr_db=least)))
    assert confirmed["everything"]["ratio"] < 0.95
    assert result.unchanged == unchanged
    assert "; the search ended at its limit of 1 build, before it was done" in result.reason
    missed = result.reason.startswith("1 faster candidate misses the SQNR limit of 90 dB by ")
    assert missed == unchanged
