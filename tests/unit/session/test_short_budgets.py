"""Full quantization is confirmed beside the reference and may be selected, however early a search ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdqspec._core.registry import names
from qdqspec.app.session import Session
from qdqspec.types import AccuracyRules, Case, Inputs, SearchResult, TuneRules


@pytest.fixture
def case(case: Case, project: Path) -> Case:
    """A budget for the reference only."""
    data = project / "data.npz"
    inputs = Inputs(calibration=data, evaluation=data)
    return replace(case, inputs=inputs, tune=TuneRules(trials=1))


def searched(case: Case, **words: Any) -> tuple[SearchResult, dict[str, dict[str, Any]]]:
    """The result of the search, and the journal entries of the confirmation by role."""
    root = case.model.parent
    quiet = ("fake.run_noise=0.005", "fake.wall_noise=0.01", "fake.build_noise=0.002", "fake.integer=0.8")
    with Session(backend="fake", root=root, output=Path("out"), backend_option=quiet, **words) as session:
        result = session.search(case)
        journal = session.output(case) / "trials.jsonl"
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return result, {line["role"]: line for line in lines if line["phase"] == "confirm"}


@pytest.mark.parametrize("strategy", names("strategy"))
def test_full_quantization_without_a_trial_is_confirmed_and_selected_if_proved(
    case: Case, strategy: str
) -> None:
    result, confirmed = searched(replace(case, tune=replace(case.tune, strategy=strategy)))
    assert [trial.placement.sites for trial in result.trials if trial.phase != "confirm"] == [frozenset()]
    assert confirmed.keys() == {"reference", "winner", "everything"}
    assert confirmed["everything"]["ratio"] < 0.95
    assert result.winner.digest == confirmed["everything"]["placement"]
    assert not result.unchanged


def test_full_quantization_selected_without_a_trial_is_cached_and_reusable(case: Case) -> None:
    """It is read from the cache, selected by its digest, and a seed of the next search by ``patterns.yaml``."""
    first, _ = searched(case)
    assert first.total == 1, "its profile is no candidate of the search"
    _, *rows = (case.model.parent / "out" / "chain" / "default" / "layers.csv").read_text().splitlines()
    assert {row.partition(",")[0] for row in rows} == {"reference", "tuned"}
    again, _ = searched(case)
    assert again.provenance.source == "cached"
    assert again.winner == first.winner
    assert again.winner.labels == first.winner.labels
    named, _ = searched(case, scheme=first.winner.digest[:8])
    assert named.winner == first.winner
    patterns = case.model.parent / "out" / "chain" / "default" / "patterns.yaml"
    sister, _ = searched(replace(case, tune=TuneRules(trials=2, start_from=(patterns,))))
    assert first.winner in [trial.placement for trial in sister.trials]


@pytest.mark.parametrize(("least", "unchanged"), [(5.0, False), (90.0, True)])
def test_the_sqnr_of_full_quantization_without_a_trial_is_measured_before_selection(
    case: Case, least: float, unchanged: bool
) -> None:
    result, confirmed = searched(replace(case, tune=replace(case.tune, min_sqnr_db=least)))
    assert confirmed["everything"]["ratio"] < 0.95
    assert result.unchanged == unchanged
    assert "; the search ended at its limit of 1 build, before it was done" in result.reason
    missed = result.reason.startswith("1 faster candidate misses the SQNR limit of 90 dB by ")
    assert missed == unchanged


def test_full_quantization_without_a_trial_is_scored_before_selection(case: Case) -> None:
    scores: list[float] = []

    def mine(outputs: Any, labels: Any) -> float:
        """A metric of 1 for the float model and 0 for all others."""
        scores.append(0.0 if scores else 1.0)
        return scores[-1]

    asked = replace(case, tune=replace(case.tune, accuracy=AccuracyRules(metric="mine", min=0.5)))
    result, confirmed = searched(asked, metrics={"mine": mine})
    assert confirmed["everything"]["ratio"] < 0.95
    assert confirmed["everything"]["accuracy"] == 0.0
    assert result.unchanged
    assert len(scores) == 2
