"""Task metrics of a case: user metrics, errors before the first build, and metrics as a constraint of the search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqspec.app.report.formats.markdown import MarkdownFormat
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.errors import ConfigError, DataError
from qdqspec.testing.records import params_of
from qdqspec.types import AccuracyRules, Case, CheckSpec, Inputs, TuneRules

# Two convolutions and a classifier of four classes; on random images any two models agree on most of them.
TEXT = """<ir_version: 8, opset_import: ["": 19]> net (float[1,8,12,12] x) => (float[1,4] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)  d = Add(b, c)
  e = GlobalAveragePool(d)  f = Flatten(e)  y = Gemm(f, v) }"""
SAMPLES = 4

Open = Callable[..., Session]


def correct(outputs, labels) -> float:
    return float((outputs["y"].argmax(axis=1) == labels).mean())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(TEXT)
    for name, shape in {"w": (8, 8, 3, 3), "v": (8, 4)}.items():
        values = random.normal(0, 0.2, shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "net.onnx")
    images = random.normal(size=(SAMPLES, 8, 12, 12)).astype(np.float32)
    outputs = ReferenceEvaluator(proto)
    labels = np.array([outputs.run(None, {"x": image[None]})[0].argmax() for image in images])
    np.savez(tmp_path / "data.npz", x=images, labels=labels)
    return tmp_path


@pytest.fixture
def case(project: Path) -> Case:
    return Case(
        id="default",
        model=project / "net.onnx",
        spec=project / "net.qdq.yaml",
        inputs=Inputs(calibration=project / "data.npz", evaluation=project / "data.npz"),
        tune=TuneRules(trials=2),
    )


def with_check(case: Case, **params: object) -> tuple[Case, CheckSpec]:
    check = CheckSpec(id="accuracy", kind="accuracy", params=params_of("accuracy", **params), line=7)
    return replace(case, checks=(check,)), check


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Open]:
    sessions: list[Session] = []

    def open_it(**settings) -> Session:
        session = Session(**{"backend": "fake", "root": tmp_path / "root", **settings})
        quiet = {"fake.run_noise": "0.005", "fake.wall_noise": "0.01", "fake.build_noise": "0.002"}
        session.runtime().options = BuildOptions(extra=quiet)
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


def count_builds(session: Session) -> list[Path]:
    built: list[Path] = []
    build = session.runtime().backend.build

    def counted(model: Path, options: BuildOptions):
        built.append(model)
        return build(model, options)

    session.runtime().backend.build = counted  # type: ignore[method-assign]
    return built


# ---- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["session", "case"])
def test_a_check_applies_a_user_metric(open_session: Open, case: Case, given: str) -> None:
    case, check = with_check(case, metric="mine", max_drop=1.0)
    session = open_session(metrics={"mine": correct} if given == "session" else None)
    case = case if given == "session" else replace(case, metrics={"mine": correct})
    result = session.judge(case, check)
    assert result.verdict.outcome == "pass"
    assert result.verdict.numbers["reference"] == 1.0
    assert result.verdict.numbers["samples"] == SAMPLES


def test_a_metric_of_the_case_overrides_that_of_the_session(open_session: Open, case: Case) -> None:
    case, check = with_check(case, metric="mine", min=0.0)
    session = open_session(metrics={"mine": lambda *_: 1.0})
    result = session.judge(replace(case, metrics={"mine": lambda *_: 7.0}), check)
    assert result.verdict.numbers["tuned"] == 7.0


def test_samples_with_a_changed_result_are_counted(open_session: Open, case: Case) -> None:
    case, _ = with_check(case, metric="top1", max_drop=0.99)
    found = open_session().evidence(case, frozenset({"accuracy"})).accuracy["top1"]
    assert found.lost is not None
    assert found.gained == 0  # the reference is correct on all samples
    assert found.reference - found.tuned == pytest.approx(found.lost / SAMPLES)


@pytest.mark.parametrize(
    ("params", "spoil", "kind", "problem"),
    [
        ({"metric": "recal"}, {}, ConfigError, r"unknown metric 'recal' \(did you mean 'recall'\?\)"),
        ({"metric": "top1"}, {"evaluation": None}, DataError, "there is no evaluation data"),
    ],
)
def test_a_check_that_cannot_be_evaluated_is_an_error_before_any_build(
    open_session: Open, case: Case, params: dict, spoil: dict, kind: type[Exception], problem: str
) -> None:
    case, check = with_check(case, min=0.5, **params)
    case = replace(case, inputs=replace(case.inputs, **spoil))
    session = open_session(metrics={"recall": correct})
    built = count_builds(session)
    with pytest.raises(kind, match=problem) as caught:
        session.judge(case, check)
    assert str(caught.value).startswith(f"{case.spec}:7: ")
    assert built == []


def test_missing_labels_are_an_error_before_any_build(open_session: Open, case: Case, project: Path) -> None:
    np.savez(project / "data.npz", x=np.zeros((2, 8, 12, 12), np.float32))
    case, check = with_check(case, min=0.5)
    session = open_session()
    built = count_builds(session)
    with pytest.raises(DataError, match="no array 'labels'"):
        session.judge(case, check)
    assert built == []


def test_an_unknown_metric_is_an_error_before_the_search(open_session: Open, case: Case) -> None:
    case, _ = with_check(case, metric="recal", min=0.5)
    with pytest.raises(ConfigError, match="unknown metric 'recal'"):
        open_session().evidence(case, frozenset({"latency"}))


def test_a_metric_that_fails_on_the_tuned_model_fails_only_its_check(open_session: Open, case: Case) -> None:
    calls = iter(range(9))
    case, good = with_check(case, metric="mine", min=0.0)
    bad = replace(good, id="bad", params=params_of("accuracy", metric="bad", min=0.0))
    case = replace(case, checks=(good, bad))
    metrics = {"mine": correct, "bad": lambda outputs, _: outputs["z"] if next(calls) else 1.0}
    session = open_session(metrics=metrics)
    with pytest.raises(DataError, match="metric 'bad' raised KeyError: 'z'"):
        session.judge(case, bad)
    assert session.judge(case, good).verdict.outcome == "pass"


def test_the_error_of_invalid_labels_names_their_file(open_session: Open, case: Case, project: Path) -> None:
    np.savez(project / "data.npz", x=np.zeros((2, 8, 12, 12), np.float32), labels=np.array([0, 9]))
    case, check = with_check(case, min=0.5)
    with pytest.raises(DataError, match="label 9 is no class") as caught:
        open_session().judge(case, check)
    assert caught.value.where == str(project / "data.npz")


@pytest.mark.parametrize("metrics", [["recall"], {"recall": 0.5}])
def test_metrics_must_be_a_mapping_of_names_to_functions(open_session: Open, metrics) -> None:
    with pytest.raises(ConfigError, match="metrics are a mapping of names to functions"):
        open_session(metrics=metrics)


# ---- a constraint of the search -----------------------------------------------------------------


class Closeness:
    """A metric finer than a count of samples: 1 minus the relative distance to the reference outputs."""

    def __init__(self, project: Path) -> None:
        proto = onnx.load(project / "net.onnx")
        images = arrays_of(project / "data.npz")["x"]
        evaluator = ReferenceEvaluator(proto)
        self.expected = np.concatenate([evaluator.run(None, {"x": image[None]})[0] for image in images])
        self.values: list[float] = []

    def __call__(self, outputs, labels) -> float:
        distance = np.abs(outputs["y"] - self.expected).mean() / np.abs(self.expected).mean()
        self.values.append(float(1 - distance))
        return self.values[-1]


def held(case: Case, **rules: object) -> Case:
    return replace(case, tune=replace(case.tune, trials=8, accuracy=AccuracyRules(metric="close", **rules)))


@pytest.fixture
def close(project: Path) -> Closeness:
    return Closeness(project)


def unheld(open_session: Open, case: Case, close: Closeness) -> list[float]:
    """The values of the metric for the quantized candidates of a search without its constraint."""
    search = open_session(metrics={"close": close}).search(held(case, min=-1e9))
    close.values.clear()
    return sorted(t.accuracy for t in search.trials if t.accuracy is not None and t.placement.sites)


def test_the_selected_model_meets_the_metric_constraint(
    open_session: Open, case: Case, close: Closeness
) -> None:
    seen = unheld(open_session, case, close)
    least = (seen[0] + 1) / 2  # above the value of the model selected without the constraint
    session = open_session(metrics={"close": close})
    case = held(case, max_drop=1 - least)
    search = session.search(case)
    assert search.accuracy is not None
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
    session = open_session(metrics={"close": close})
    case = held(case, max_drop=1e-6)
    evidence = session.evidence(case, frozenset({"latency"}))
    search = evidence.search
    assert search is not None
    assert search.unchanged
    assert search.accuracy is not None
    assert search.accuracy.selected == search.accuracy.reference
    assert search.accuracy.best == max(v for v in close.values[1:])
    best = f"{search.accuracy.best:.4g}"
    assert re.search(
        r"faster candidates? miss(es)? the limit of close of 1 by (at least )?0\.00", search.reason
    )
    assert f"has close {best} in 0." in search.reason
    (first, *_) = search.rejected
    assert first.role.startswith("fastest")
    assert first.reason.endswith(" below the limit of close of 1")
    assert (session.output(case) / "trials.jsonl").read_text().count('"accuracy"') >= search.accuracy.scored


def test_a_resumed_search_scores_only_candidates_without_a_score(
    open_session: Open, case: Case, close: Closeness
) -> None:
    case = held(case, max_drop=1.0)
    first = open_session(metrics={"close": close})
    seen = []

    def stop(progress) -> None:
        seen.append(progress)
        if len(close.values) == 3:  # the reference and two candidates
            raise KeyboardInterrupt

    first.watch = stop
    with pytest.raises(KeyboardInterrupt):
        first.search(case)
    again = Closeness(case.model.parent)
    search = open_session(metrics={"close": again}).search(case)
    assert search.accuracy is not None
    assert search.accuracy.scored == 2 + len(again.values) - 1  # the reference is scored in every run
    assert search.provenance.source == "measured"


def test_another_metric_of_the_same_name_misses_the_cache(
    open_session: Open, case: Case, close: Closeness
) -> None:
    case = held(case, min=-1e9)
    first = open_session(metrics={"close": close}).search(case)
    assert open_session(metrics={"close": close}).search(case).provenance.source == "cached"
    other = open_session(metrics={"close": lambda *_: 7.0}).search(case)
    assert other.provenance.source == "measured"
    assert first.accuracy is not None
    assert other.accuracy is not None
    assert (first.accuracy.reference, other.accuracy.reference) == (pytest.approx(1.0), 7.0)


def test_a_cached_winner_below_the_metric_constraint_starts_a_new_search(
    open_session: Open, case: Case, close: Closeness
) -> None:
    case = held(case, max_drop=1.0)
    first = open_session(metrics={"close": close}).search(case)
    assert not first.unchanged

    def stricter(outputs, labels) -> float:
        value = close(outputs, labels)
        return value if value > 1 - 1e-6 else -9.0  # unchanged for the reference

    evidence = open_session(metrics={"close": stricter}).evidence(case, frozenset({"latency"}))
    assert evidence.search is not None
    assert evidence.search.provenance.source == "measured"
    assert evidence.search.unchanged
    assert any("the cached winner has close -9 now" in warning for warning in evidence.warnings)


def test_points_of_a_front_are_scored_and_meet_the_metric_constraint(
    open_session: Open, case: Case, close: Closeness
) -> None:
    seen = unheld(open_session, case, close)
    case = held(case, max_drop=1 - (seen[0] + 1) / 2)
    case = replace(case, tune=replace(case.tune, objective="pareto", trials=14))
    session = open_session(metrics={"close": close})
    search = session.search(case)
    assert search.accuracy is not None
    assert search.front
    scores = [point.accuracy for point in search.front]
    assert all(score is not None and score >= search.accuracy.least for score in scores)
    header, *rows = (session.output(case) / "front" / "front.csv").read_text().splitlines()
    assert header.endswith(",sqnr_db,accuracy")
    assert [float(row.rpartition(",")[2]) for row in rows] == pytest.approx(scores, rel=1e-5)
    assert search.accuracy.scored <= len(close.values)


def test_a_metric_of_nan_for_the_reference_is_an_error_before_the_search(
    open_session: Open, case: Case
) -> None:
    session = open_session(metrics={"close": lambda *_: float("nan")})
    built = count_builds(session)
    with pytest.raises(DataError, match="metric 'close' gave nan for the model itself"):
        session.search(held(case, min=0.0))
    assert {path.name for path in built} <= {"net.onnx", "observer.onnx"}


def test_a_metric_that_fails_on_candidates_fails_their_trials(
    open_session: Open, case: Case, close: Closeness
) -> None:
    def picky(outputs, labels) -> float:
        if close(outputs, labels) < 1 - 1e-6:
            raise ValueError("not these")
        return 1.0

    search = open_session(metrics={"close": picky}).search(held(case, min=0.0))
    assert search.unchanged
    failed = [trial for trial in search.trials if not trial.ok]
    assert failed
    assert all("metric 'close' raised ValueError: not these" in (trial.error or "") for trial in failed)


def test_metric_constraints_that_are_hard_to_meet_are_warned_about(open_session: Open, case: Case) -> None:
    rules = AccuracyRules(metric="top1", max_drop=0.01, min=1.5)
    case = replace(case, tune=replace(case.tune, trials=1, accuracy=rules))
    warnings = open_session().evidence(case, frozenset()).warnings
    assert (
        "tune.accuracy: one sample of 4 is 25 %, so that a drop of 1.0 % allows no loss of a sample"
        in warnings
    )
    assert "tune.accuracy: the reference itself has top1 100.0 %, below the limit 150.0 %" in warnings


def test_a_plan_states_where_the_metric_is_computed(open_session: Open, case: Case, close: Closeness) -> None:
    text = open_session(metrics={"close": close}, mode="plan").planned(held(case, min=0.5)).text
    assert text.endswith(
        f"close on {SAMPLES} samples, of the reference and of each candidate that has won its races"
    )
    assert close.values == []


def test_the_record_contains_the_metric_constraint(open_session: Open, case: Case, close: Closeness) -> None:
    case, check = with_check(held(case, max_drop=1.0), metric="close", max_drop=1.0)
    session = open_session(metrics={"close": close})
    session.judge(case, check)
    record = session.record()
    again = record_from_json(json.loads(json.dumps(record_to_json(record))))
    assert again.cases[0].evidence.search.accuracy == record.cases[0].evidence.search.accuracy
    assert [t.accuracy for t in again.cases[0].evidence.search.trials] == [
        t.accuracy for t in record.cases[0].evidence.search.trials
    ]
    assert "held to close" in MarkdownFormat().render(record)
    evidence = replace(record.cases[0].evidence, accuracy={})
    assert evidence.metrics == {"close": evidence.search.accuracy.selected}
