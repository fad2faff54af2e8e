"""Task metrics of a case: user metrics, errors before the first build, and metrics as a constraint of the search."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from onnx.reference import ReferenceEvaluator
from sessions import Open, count_builds
from written_cases import check_of, normal, written_case

from qdqspec.errors import ConfigError, DataError
from qdqspec.types import AccuracyRules, Case, Inputs, TuneRules

# Two convolutions and a classifier of four classes; on random images any two models agree on most of them.
TEXT = """net (float[1,8,12,12] x) => (float[1,4] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)  d = Add(b, c)
  e = GlobalAveragePool(d)  f = Flatten(e)  y = Gemm(f, v) }"""
SAMPLES = 4


def correct(outputs, labels) -> float:
    return float((outputs["y"].argmax(axis=1) == labels).mean())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A model that is correct on all samples, which are in ``data.npz``."""
    images = normal(SAMPLES, 8, 12, 12, seed=2)
    weights = {"w": normal(8, 8, 3, 3, deviation=0.2), "v": normal(8, 4, deviation=0.2, seed=1)}
    case = written_case(tmp_path, TEXT, {}, TuneRules(trials=2), **weights)
    labels = reference_outputs(case.model, images).argmax(axis=1)
    np.savez(tmp_path / "data.npz", x=images, labels=labels)
    inputs = Inputs(calibration=tmp_path / "data.npz", evaluation=tmp_path / "data.npz")
    return replace(case, spec=tmp_path / "net.qdq.yaml", inputs=inputs)


def reference_outputs(model: Path, images: np.ndarray) -> np.ndarray:
    evaluator = ReferenceEvaluator(onnx.load(model))
    return np.concatenate([evaluator.run(None, {"x": image[None]})[0] for image in images])


# ---- checks -------------------------------------------------------------------------------------


def test_a_check_applies_a_user_metric_of_the_session_or_of_the_case(open_session: Open, case: Case) -> None:
    check = check_of("accuracy", metric="mine", max_drop=1.0)
    case = replace(case, checks=(check,))
    result = open_session(metrics={"mine": correct}).judge(case, check)
    assert result.verdict.outcome == "pass"
    assert result.verdict.numbers["reference"] == 1.0
    assert result.verdict.numbers["samples"] == SAMPLES
    own_case = replace(case, metrics={"mine": lambda *_: 7.0})
    own = open_session(metrics={"mine": correct}).judge(own_case, check)
    assert own.verdict.numbers["tuned"] == 7.0, "the metric of a case precedes that of the session"


@pytest.mark.parametrize("metrics", [["recall"], {"recall": 0.5}])
def test_metrics_must_be_a_mapping_of_names_to_functions(open_session: Open, metrics) -> None:
    with pytest.raises(ConfigError, match="metrics are a mapping of names to functions"):
        open_session(metrics=metrics)


# ---- a constraint of the search -----------------------------------------------------------------


class Closeness:
    """A metric finer than a count of samples: 1 minus the relative distance to the reference outputs."""

    def __init__(self, case: Case) -> None:
        images = arrays_of(case.model.with_name("data.npz"))["x"]
        self.expected = reference_outputs(case.model, images)
        self.values: list[float] = []

    def __call__(self, outputs, labels) -> float:
        distance = np.abs(outputs["y"] - self.expected).mean() / np.abs(self.expected).mean()
        self.values.append(float(1 - distance))
        return self.values[-1]


def held(case: Case, trials: int = 8, **rules: object) -> Case:
    accuracy = AccuracyRules(**{"metric": "close", **rules})
    return replace(case, tune=replace(case.tune, trials=trials, accuracy=accuracy))


@pytest.fixture
def close(case: Case) -> Closeness:
    return Closeness(case)


def unheld(open_session: Open, case: Case, close: Closeness) -> list[float]:
    """The values of the metric for the quantized candidates of a search without its constraint."""
    search = open_session(metrics={"close": close}).search(held(case, min=-1e9))
    close.values.clear()
    return sorted(t.accuracy for t in search.trials if t.accuracy is not None and t.placement.sites)


def test_the_selected_model_meets_the_metric(open_session: Open, case: Case, close: Closeness) -> None:
    seen = unheld(open_session, case, close)
    least = (seen[0] + 1) / 2  # above the value of the model selected without the constraint
    session = open_session(metrics={"close": close})
    case = held(case, max_drop=1 - least)
    search = session.search(case)
    assert search.accuracy.reference == pytest.approx(1.0)
    assert search.accuracy.least == pytest.approx(least)
    assert search.accuracy.selected >= least - 1e-6
    assert search.accuracy.samples == SAMPLES
    refused = [t for t in search.trials if t.accuracy is not None and t.accuracy < search.accuracy.least]
    assert refused
    assert not any(trial.incumbent for trial in refused)
    assert search.winner.digest not in {trial.placement.digest for trial in refused}
    assert search.accuracy.scored == len(close.values) - 1  # each candidate and the reference are scored once


def test_a_metric_constraint_that_no_candidate_meets_keeps_the_model_unchanged(
    open_session: Open, case: Case, close: Closeness
) -> None:
    search = open_session(metrics={"close": close}).search(held(case, max_drop=1e-6))
    assert search.unchanged
    assert search.accuracy.selected == search.accuracy.reference
    best = f"{search.accuracy.best:.4g}"
    assert re.search(r"faster candidates? miss(es)? the limit of close of 1 by .*0\.00", search.reason)
    assert f"has close {best} in 0." in search.reason
    assert search.rejected[0].reason.endswith(" below the limit of close of 1")


def test_another_metric_of_a_name_misses_the_cache_or_fails_the_recheck(
    open_session: Open, case: Case, close: Closeness
) -> None:
    case = held(case, max_drop=1.0)
    assert not open_session(metrics={"close": close}).search(case).unchanged
    assert open_session(metrics={"close": close}).search(case).provenance.source == "cached"
    other = open_session(metrics={"close": lambda *_: 7.0}).search(case)
    assert (other.provenance.source, other.accuracy.reference) == ("measured", 7.0)

    def stricter(outputs, labels) -> float:
        value = close(outputs, labels)
        return value if value > 1 - 1e-6 else -9.0  # unchanged for the reference

    evidence = open_session(metrics={"close": stricter}).evidence(case, frozenset())
    assert (evidence.search.provenance.source, evidence.search.unchanged) == ("measured", True)
    assert any("the cached winner has close -9 now" in warning for warning in evidence.warnings)


def test_points_of_a_front_are_scored_and_meet_the_metric_constraint(
    open_session: Open, case: Case, close: Closeness
) -> None:
    seen = unheld(open_session, case, close)
    case = held(case, 14, max_drop=1 - (seen[0] + 1) / 2)
    case = replace(case, tune=replace(case.tune, objective="pareto"))
    session = open_session(metrics={"close": close})
    search = session.search(case)
    assert search.front
    scores = [point.accuracy for point in search.front]
    assert all(score is not None and score >= search.accuracy.least for score in scores)
    header, *rows = (session.output(case) / "front" / "front.csv").read_text().splitlines()
    assert header.endswith(",sqnr_db,accuracy")
    assert [float(row.rpartition(",")[2]) for row in rows] == pytest.approx(scores, rel=1e-5)


def test_a_metric_that_fails_for_the_reference_is_an_error_and_else_fails_the_trials(
    open_session: Open, case: Case, close: Closeness
) -> None:
    session = open_session(metrics={"close": lambda *_: float("nan")})
    built = count_builds(session)
    with pytest.raises(DataError, match="metric 'close' gave nan for the model itself"):
        session.search(held(case, min=0.0))
    assert {path.name for path in built} <= {"net.onnx", "observer.onnx"}, "before the search"

    def picky(outputs, labels) -> float:
        if close(outputs, labels) < 1 - 1e-6:
            raise ValueError("not these")
        return 1.0

    search = open_session(metrics={"close": picky}).search(held(case, min=0.0))
    assert search.unchanged
    errors = [str(trial.error) for trial in search.trials if not trial.ok]
    assert any("metric 'close' raised ValueError: not these" in error for error in errors)


def test_a_reference_below_the_limit_of_the_metric_is_warned_about(open_session: Open, case: Case) -> None:
    warnings = open_session().evidence(held(case, 1, metric="top1", min=1.5), frozenset()).warnings
    assert "tune.accuracy: the reference itself has top1 100.0 %, below the limit 150.0 %" in warnings
