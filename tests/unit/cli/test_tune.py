"""``qdqspec tune``: real runs, and a session with made-up numbers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import onnx
import other_fake
import pytest
from stand_ins import simulate_times

from qdqspec.app.session.result import Plan
from qdqspec.errors import BackendError
from qdqspec.spec.inline import inline_case
from tests.plugin import fake_session

PLAN = Plan(format="int8", units=0, regions=0)
SPEC = """\
qdqspec: 1
model: m.onnx
matrix: {batch: [1, 8]}
tune: {trials: 12}
checks:
  - {kind: speedup, min: 1.1}
  - {kind: parity, min_sqnr_db: 25}
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Replaces the session by the fake one of the plugin tests; gives a list of the sessions and their settings."""
    monkeypatch.setattr(fake_session, "HERE", tmp_path)
    made = []

    class Session(fake_session.FakeSession):
        def __init__(self, settings):
            super().__init__()
            self.settings = settings
            made.append(self)

    monkeypatch.setattr("qdqspec.app.session.Session", Session)
    (tmp_path / "a.qdq.yaml").write_text(SPEC)
    return made


@pytest.fixture
def planned(verb, fake, monkeypatch):
    """``planned("m.onnx --trials 3")``: the case of a call with ``--mode plan``."""
    from qdqspec.app.session import Session

    cases = []
    monkeypatch.setattr(Session, "planned", lambda self, case: cases.append(case) or PLAN, raising=False)

    def plan(words):
        result = verb("tune", *shlex.split(words), "--mode", "plan")
        assert result.code == 0, result.err
        assert PLAN.text in result.out
        return cases.pop()

    return plan


def calls(folder: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in (folder / "calls.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("integer", "status"), [(0.5, "tuned"), (8.0, "unchanged")], ids=["integers faster", "integers slower"]
)
def test_a_model_is_tuned_into_the_output_folder(verb, models, tmp_path, monkeypatch, integer, status):
    simulate_times(monkeypatch, integer)
    before = (models / "digits_resnet.onnx").read_bytes()
    result = verb("tune", models / "digits_resnet.onnx", "-o", "out", "--trials", "2", "--json", "--no-cache")
    assert result.code == 0, result.err
    (case,) = result.json["cases"]
    assert case["status"] == status
    assert case["speedup"]["median"] > 0
    assert {"reference.onnx", "tuned.onnx", "trials.jsonl", "result.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert (models / "digits_resnet.onnx").read_bytes() == before
    nodes = sum(node.op_type != "Constant" for node in onnx.load(models / "digits_resnet.onnx").graph.node)
    assert sum(sum(part["ops"].values()) for part in case["graph"]) == nodes
    assert sum(part["reference_ms"] for part in case["graph"]) > 0


def test_the_tuned_model_is_copied_to_a_file(verb, models, tmp_path):
    words = ("--backend", "fake", "--trials", "2", "--no-cache")
    result = verb("tune", models / "digits_resnet.onnx", "-o", "new/x.onnx", *words)
    assert result.code == 0, result.err
    written = tmp_path / "reports" / "digits_resnet" / "default" / "tuned.onnx"
    assert onnx.load(tmp_path / "new" / "x.onnx") == onnx.load(written)
    assert f"Tuned model: {tmp_path / 'new' / 'x.onnx'}" in result.out


def test_a_spec_is_judged_case_by_case(verb, fake, tmp_path):
    result = verb("tune", "a.qdq.yaml", "-o", "out")
    assert result.code == 0
    assert {"a::b1", "a::b8"} <= set(result.out.split())
    judged = [line.split()[1] for line in calls(tmp_path)[:-1]]
    assert judged == ["b1::speedup", "b1::parity", "b8::speedup", "b8::parity"]
    assert (tmp_path / "out" / "b8").is_dir()


def test_results_of_another_model_are_not_overwritten(verb, models, tmp_path):
    shutil.copy(models / "digits_resnet.onnx", tmp_path / "a.onnx")
    (tmp_path / "other").mkdir()
    shutil.copy(models / "digits_resnet.onnx", tmp_path / "other" / "a.onnx")
    words = ("-o", "out", "--trials", "1", "--backend", "fake")
    assert verb("tune", "a.onnx", *words).code == 0
    before = (tmp_path / "out" / "result.json").read_bytes()
    refused = verb("tune", "other/a.onnx", *words)
    assert refused.code == 2
    assert "out: this folder holds the results of another model or spec (../a.onnx)" in refused.err
    assert "choose another folder with -o, or remove this one" in refused.err
    assert (tmp_path / "out" / "result.json").read_bytes() == before
    assert verb("tune", "a.onnx", *words).code == 0  # results of the same model are overwritten


@pytest.mark.parametrize(
    ("outcome", "words", "code", "message"),
    [
        ("fail", (), 1, "fail: a::b8::speedup - speed-up 1.02 < 1.10 asked for"),
        ("inconclusive", (), 0, "straddles"),
        ("inconclusive", ("--require", "conclusive"), 1, "straddles"),
        ("warn", (), 0, "warning: a::b8::speedup - speed-up 1.02"),
    ],
)
def test_the_exit_code_of_a_spec_is_that_of_its_checks(verb, fake, tmp_path, outcome, words, code, message):
    severity = "warn" if outcome == "warn" else "error"
    (tmp_path / "a.qdq.yaml").write_text(SPEC.replace("min: 1.1", f"min: 1.1, severity: {severity}"))
    (tmp_path / "outcomes.json").write_text(json.dumps({"b8::speedup": outcome}))
    result = verb("tune", "a.qdq.yaml", *words)
    assert result.code == code
    assert result.out.count(message) == 1, "the reason is printed once"


def test_options_of_the_command_line_override_the_spec(planned):
    case = planned(
        "a.qdq.yaml::b1 --strategy attribution --trials 3 --minutes 0.5 --preset quick --quant fp8"
        " --calibration c.npz --min-sqnr-db none --min-gain 5%"
    )
    assert (case.tune.trials, case.tune.minutes, case.tune.preset) == (3, 0.5, "quick")
    assert (case.tune.min_sqnr_db, case.tune.min_gain) == ("none", 0.05)
    assert case.quantize.format == "fp8"
    assert case.inputs.calibration == Path.cwd() / "c.npz"


def test_constraint_options_equal_those_of_specs_and_python(planned, tmp_path):
    line = planned(
        "m.onnx --evaluation e.npz --metric top5 --max-drop 1% --min 90% --objective pareto"
        " --corrections ranges,bits --deny Softmax --deny 'Gemm > Relu' --allow Conv --exclude '/a/*'"
        " --include '/b/*' --start-from p.yaml"
    )
    (tmp_path / "b.qdq.yaml").write_text("""\
qdqspec: 1
model: m.onnx
inputs: {evaluation: e.npz}
patterns: {deny: [Softmax, Gemm > Relu], allow: [Conv], nodes: {exclude: ["/a/*"], include: ["/b/*"]}}
quantize: {corrections: [ranges, bits]}
tune: {objective: pareto, accuracy: {metric: top5, max_drop: 0.01, min: 90%}, start_from: [p.yaml]}
checks: [{kind: speedup, min: 1.0}]
""")
    asked = inline_case(
        "m.onnx",
        {
            "evaluation": "e.npz", "metric": "top5", "max_drop": "1%", "min": 0.9, "objective": "pareto",
            "deny": ["Softmax", "Gemm > Relu"], "allow": ["Conv"], "exclude": ["/a/*"], "include": ["/b/*"],
            "start_from": ["p.yaml"], "corrections": ["ranges", "bits"],
        },
    )  # fmt: skip
    for case in (line, planned("b.qdq.yaml")):
        assert (case.inputs, case.patterns, case.tune) == (asked.inputs, asked.patterns, asked.tune)
        assert case.quantize == asked.quantize


def test_shapes_and_values_have_the_syntax_of_trtexec(planned):
    def shapes(words):
        found = planned(f"m.onnx {words}").inputs.profiles[0].shapes
        return {name: (shape.min, shape.opt, shape.max) for name, shape in found.items()}

    assert planned("m.onnx --values sr:16000,train:false").inputs.values == {"sr": 16000, "train": False}
    assert shapes("--shapes x:1x3x8x8 --shapes y:2") == {"x": ((1, 3, 8, 8),) * 3, "y": ((2,),) * 3}
    one = shapes("--shapes x,1:1x3x8x8,serving:ids:0:1x16")
    assert one == {"x,1": ((1, 3, 8, 8),) * 3, "serving:ids:0": ((1, 16),) * 3}
    ranges = shapes("--min-shapes x:1x3 --opt-shapes x:8x3,y:2 --max-shapes x:16x3")
    assert ranges == {"x": ((1, 3), (8, 3), (16, 3)), "y": ((2,), (2,), (2,))}


def test_names_layers_and_patterns_are_read_from_files(planned, tmp_path):
    (tmp_path / "names.txt").write_text("/a/*  # first\n\n/b\n")
    (tmp_path / "more.json").write_text("{}")
    case = planned(
        "m.onnx --include /c --include-file names.txt --graph-json more.json --start-from s.json"
        " --pattern-cache patterns.yaml --strategy region --trials-per-region 3"
    )
    assert case.patterns.include == ("/c", "/a/*", "/b")
    assert (case.regions.by, case.regions.graph) == ("fusion", tmp_path / "more.json")
    assert case.tune.start_from == (tmp_path / "s.json", tmp_path / "patterns.yaml")
    assert case.tune.trials_per_region == 3
    assert planned("m.onnx --strategy subgraph --validate-groups false").tune.validate_groups is False


def test_progress_goes_to_standard_error(verb, fake, monkeypatch):
    monkeypatch.setattr("qdqspec._core.progress.HEARTBEAT_SECONDS", 0)
    result = verb("tune", "a.qdq.yaml", "--json")
    assert "[qdqspec] a::b1: compose, trial 3 of 12" in result.err
    assert result.json
    assert fake[0].watch is None


def test_other_cases_run_if_one_cannot_run_here(verb, fake, monkeypatch, tmp_path):
    from qdqspec.app.session import Session
    from qdqspec.backends.base import Availability

    missing = Availability(usable=False, why="no int8", install="buy one")
    monkeypatch.setattr(
        Session, "availability", lambda self, case: missing if case.id == "b1" else Availability(usable=True)
    )
    result = verb("tune", "a.qdq.yaml", "--json", "--report", "out.csv")
    assert result.code == 2
    assert "backend onnxruntime is not usable here: no int8\n  buy one" in result.err
    assert re.search(r"a::b1 +skipped", result.json["text"])
    status = {case["id"]: case["status"] for case in result.json["cases"]}
    assert status == {"b1": "skipped", "b8": "tuned"}
    assert "no int8" in (tmp_path / "out.csv").read_text()


@pytest.fixture
def other(monkeypatch):
    other_fake.install(monkeypatch, scale=0.5)


def test_several_backends_are_tuned_and_timed_together(verb, models, tmp_path, other):
    words = ("--trials", "2", "--min-sqnr-db", "none", "-o", "out")
    result = verb("tune", models / "digits_resnet.onnx", "--backend", "fake,other", *words)
    assert result.code == 0, result.err
    assert {"fake", "other", "tune.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "fastest that meets the accuracy limits: " in result.out
    assert "float on other is faster than the model tuned for fake" in result.out
    (found,) = json.loads((tmp_path / "out" / "tune.json").read_text())["runtimes"]
    assert found["reference"] == "other float"
    assert {model["backend"] for model in found["models"]} == {"fake", "other"}


def test_results_of_other_backends_are_kept_if_one_refuses_the_model(verb, models, other, monkeypatch):
    def refuse(self, model, options):
        raise BackendError("operator If is not supported", where=model.name)

    monkeypatch.setattr(other_fake.OtherDevice, "build", refuse)
    words = ("--trials", "2", "--min-sqnr-db", "none", "-o", "out")
    result = verb("tune", models / "digits_resnet.onnx", "--backend", "other,fake", *words)
    assert result.code == 2
    assert "operator If is not supported" in result.err
    assert "skipped" in result.out
    assert "operator If is not supported" in result.out
    assert json.loads(Path("out", "fake", "result.json").read_text())["status"] != "skipped"
