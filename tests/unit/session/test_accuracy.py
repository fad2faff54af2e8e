"""Task metrics of a case: the caller's own, what is refused before anything is built, and who wins by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.backends.base import BuildOptions
from qdqspec.errors import ConfigError, DataError
from qdqspec.session import Session
from qdqspec.testing.records import params_of
from qdqspec.types import Case, CheckSpec, Inputs, TuneRules

# Two convolutions and a classifier of four classes; on random images any two models agree on most of them.
TEXT = """<ir_version: 8, opset_import: ["": 19]> net (float[1,8,6,6] x) => (float[1,4] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)  d = Add(b, c)
  e = GlobalAveragePool(d)  f = Flatten(e)  y = Gemm(f, v) }"""
SAMPLES = 12

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
    images = random.normal(size=(SAMPLES, 8, 6, 6)).astype(np.float32)
    outputs = onnx.reference.ReferenceEvaluator(proto)
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
        session._options = BuildOptions(extra=quiet)
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


def count_builds(session: Session) -> list[Path]:
    built: list[Path] = []
    build = session.backend.build

    def counted(model: Path, options: BuildOptions):
        built.append(model)
        return build(model, options)

    session.backend.build = counted  # type: ignore[method-assign]
    return built


# ---- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["session", "case"])
def test_a_check_judges_by_ones_own_metric(open_session: Open, case: Case, given: str) -> None:
    case, check = with_check(case, metric="mine", max_drop=1.0)
    session = open_session(metrics={"mine": correct} if given == "session" else None)
    case = case if given == "session" else replace(case, metrics={"mine": correct})
    result = session.judge(case, check)
    assert result.verdict.outcome == "pass"
    assert result.verdict.numbers["reference"] == 1.0
    assert result.verdict.numbers["samples"] == SAMPLES


def test_the_cases_own_metric_comes_before_the_sessions(open_session: Open, case: Case) -> None:
    case, check = with_check(case, metric="mine", min=0.0)
    session = open_session(metrics={"mine": lambda *_: 1.0})
    result = session.judge(replace(case, metrics={"mine": lambda *_: 7.0}), check)
    assert result.verdict.numbers["tuned"] == 7.0


def test_samples_that_changed_are_told(open_session: Open, case: Case) -> None:
    case, _ = with_check(case, metric="top1", max_drop=1.0)
    found = open_session().evidence(case, frozenset({"accuracy"})).accuracy["top1"]
    assert found.lost is not None
    assert found.gained == 0  # the reference has all of them right
    assert found.reference - found.tuned == pytest.approx(found.lost / SAMPLES)


@pytest.mark.parametrize(
    ("params", "spoil", "kind", "problem"),
    [
        ({"metric": "recal"}, {}, ConfigError, r"unknown metric 'recal' \(did you mean 'recall'\?\)"),
        ({"metric": "top1"}, {"evaluation": None}, DataError, "there is no evaluation data"),
    ],
)
def test_what_cannot_be_judged_is_said_before_anything_is_built(
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


def test_labels_are_wanted_before_anything_is_built(open_session: Open, case: Case, project: Path) -> None:
    np.savez(project / "data.npz", x=np.zeros((2, 8, 6, 6), np.float32))
    case, check = with_check(case, min=0.5)
    session = open_session()
    built = count_builds(session)
    with pytest.raises(DataError, match="no array 'labels'"):
        session.judge(case, check)
    assert built == []


def test_other_checks_of_the_case_are_judged_all_the_same(open_session: Open, case: Case) -> None:
    case, _ = with_check(case, metric="recal", min=0.5)
    assert open_session().evidence(case, frozenset({"latency"})).latency is not None


def test_a_metric_that_fails_is_told_to_its_own_check_alone(open_session: Open, case: Case) -> None:
    case, good = with_check(case, metric="mine", min=0.0)
    bad = replace(good, id="bad", params=params_of("accuracy", metric="bad", min=0.0))
    case = replace(case, checks=(good, bad))
    session = open_session(metrics={"mine": correct, "bad": lambda outputs, _: outputs["z"]})
    with pytest.raises(DataError, match="metric 'bad' raised KeyError: 'z'"):
        session.judge(case, bad)
    assert session.judge(case, good).verdict.outcome == "pass"


def test_labels_that_do_not_fit_name_their_file(open_session: Open, case: Case, project: Path) -> None:
    np.savez(project / "data.npz", x=np.zeros((2, 8, 6, 6), np.float32), labels=np.array([0, 9]))
    case, check = with_check(case, min=0.5)
    with pytest.raises(DataError, match="label 9 is no class") as caught:
        open_session().judge(case, check)
    assert caught.value.where == str(project / "data.npz")


@pytest.mark.parametrize("metrics", [["recall"], {"recall": 0.5}])
def test_metrics_are_functions_by_name(open_session: Open, metrics) -> None:
    with pytest.raises(ConfigError, match="metrics are a mapping of names to functions"):
        open_session(metrics=metrics)
