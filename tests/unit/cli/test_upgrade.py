"""``qdqspec upgrade-check`` with a real second interpreter, in which the simulated runtime is changed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from qdqspec.app.upgrade import judge_upgrade
from qdqspec.types import Interval, Upgrade

SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 2, min_sqnr_db: none}
checks: [{kind: size, max_ratio: 2}]
"""
SAME = ""
NO_FUSION = """
from qdqspec.backends.fake import cost

cost._Simulation._absorbs = lambda self, node: False
cost.LAUNCH_MS *= 20
"""
REFUSES = """
from qdqspec.backends.fake import engine


def refuse(self, model, options):
    raise RuntimeError("this version does not read the model")


engine.FakeDevice.build = refuse
"""


@pytest.fixture
def python(tmp_path):
    """Creates an environment whose runtime is patched by a module when Python starts."""

    def make(patch: str) -> Path:
        folder = tmp_path / "other"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(patch)
        script = folder / "python"
        script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        return script

    return make


@pytest.fixture
def tuned(verb, models, tmp_path, processes):
    """A project with a tuned model of the simulated device, in ``out/default``."""
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    (tmp_path / "a.qdq.yaml").write_text(SPEC)
    result = verb("tune", "a.qdq.yaml", "--backend", "fake")
    assert result.code == 0, result.err
    return tmp_path


def test_an_equal_version_passes(verb, tuned, python):
    result = verb("upgrade-check", "a.qdq.yaml", "--backend", "fake", "--python", python(SAME), "--json")
    assert result.code == 0, result.err
    (case,) = result.json["cases"]
    assert (result.json["passed"], case["state"], case["case"]) == (True, "ok", "a::default")
    assert case["change"]["low"] < 1 < case["change"]["high"]
    assert case["layers"] == []
    assert case["sqnr_here_db"] == case["sqnr_there_db"]


def test_a_lost_fusion_is_found_and_named(verb, tuned, python):
    words = ("upgrade-check", "a.qdq.yaml", "--backend", "fake", "--python", python(NO_FUSION))
    result = verb(*words, "--json")
    assert result.code == 1, result.err
    (case,) = result.json["cases"]
    assert case["state"] == "slower"
    assert case["change"]["low"] > 1.05
    lost = [change for change in case["layers"] if "fusion" in change["kinds"]]
    assert any({"Conv", "Relu"} <= {name.split("/")[-1].split("_")[0] for name in c["nodes"]} for c in lost)
    text = verb(*words)
    assert text.code == 1
    assert "slower there, and 5.0% is allowed" in text.out
    assert "fusion" in text.out
    lenient = verb(*words, "--allow", "10000%")
    assert "slower there" not in lenient.out


def test_a_version_that_refuses_the_model_fails(verb, tuned, python):
    result = verb("upgrade-check", "reports/a/default", "--python", python(REFUSES))
    assert result.code == 1
    assert "failed: " in result.out
    assert "this version does not read the model" in result.out


def test_a_missing_package_of_the_environment_is_named(verb, tuned, python):
    broken = python("import sys\nsys.modules['numpy'] = None\n")
    result = verb("upgrade-check", "a.qdq.yaml", "--backend", "fake", "--python", broken)
    assert result.code == 2
    assert "pip install qdqspec" in result.err


def interval(low: float, median: float, high: float) -> Interval:
    return Interval(low=low, median=median, high=high)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"change": interval(1.04, 1.08, 1.12)}, "slower"),
        ({"change": interval(0.98, 1.08, 1.2)}, "ok"),  # not significant
        ({"change": interval(1.01, 1.03, 1.05)}, "ok"),  # allowed
        ({"ratio_there": interval(1.01, 1.1, 1.2)}, "slower than float"),
        ({"sqnr_here_db": 25.0, "sqnr_there_db": 19.0}, "less accurate"),
        ({"sqnr_here_db": -3.4, "sqnr_there_db": -3.5}, "ok"),  # the inputs are random
        ({"sqnr_here_db": 25.0, "sqnr_there_db": 21.0}, "ok"),
    ],
)
def test_which_changes_are_regressions(fields, state):
    found = Upgrade(case="a::b", backend="fake", state="ok", **fields)
    assert judge_upgrade(found, 0.05, 20.0)[0] == state
