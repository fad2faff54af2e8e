"""Pytest runs that tune a real model with a real session."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from qdqspec.app.cli import main

SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 2}
checks:
  - {kind: size, max_ratio: 1.5}
  - {kind: parity, min_sqnr_db: 200}
  - {kind: placement, max_pairs: 1000}
"""


@pytest.fixture
def real(pytester, models):
    """A project without any conftest."""
    (pytester.path / "pyproject.toml").write_text("[tool.pytest]\nstrict = true\n")
    (pytester.path / "specs").mkdir()
    shutil.copy(models / "digits_resnet.onnx", pytester.path / "specs")
    (pytester.path / "specs" / "a.qdq.yaml").write_text(SPEC)
    return pytester


def test_the_command_of_a_failure_reproduces_it(real):
    options = ("--qdq-backend=fake", "--qdq-backend-option=fake.integer=0.7")
    first = real.runpytest_subprocess("-W", "error", "specs", *options)
    first.assert_outcomes(passed=2, failed=1)
    command = re.search(r"Reproduce with:\n  pytest (.*)", first.stdout.str())
    scheme = re.search(r"--qdq-scheme=(\w+)", command[1])[1]
    assert command[1].endswith(" ".join(options))
    again = real.runpytest_subprocess(*command[1].split(), "--qdq-json=again.json")
    again.assert_outcomes(failed=1)
    assert json.loads((real.path / "again.json").read_text())["cases"][0]["scheme"]["digest"] == scheme


ACCURACY = """\
qdqspec: 1
model: digits_resnet.onnx
inputs:
  shapes: {input: [60, 1, 16, 16]}
  calibration: calibration.npz
  evaluation: evaluation.npz
tune: {trials: 2}
checks:
  - {kind: accuracy, metric: mean_rank, max_drop: 1}
  - {kind: accuracy, metric: top3, min: 97%, id: top3}
"""

MEAN_RANK = """\
import numpy as np
import pytest


def mean_rank(outputs, labels):
    scores = outputs["logits"]
    own = scores[np.arange(len(labels)), labels]
    return -(scores > own[:, None]).sum(axis=1).mean()


@pytest.fixture(scope="session")
def qdq_metrics():
    return {"mean_rank": mean_rank}
"""


def test_a_metric_of_a_fixture_is_applied_to_a_real_model(real, models):
    for name in ("calibration", "evaluation"):
        shutil.copy(models.parent / "data" / f"digits_{name}.npz", real.path / "specs" / f"{name}.npz")
    (real.path / "specs" / "a.qdq.yaml").write_text(ACCURACY)
    wrong = "  - {kind: accuracy, metric: mean_rang, min: 0, id: unknown}\n"
    (real.path / "specs" / "wrong.qdq.yaml").write_text(ACCURACY.replace("trials: 2", "trials: 1") + wrong)
    (real.path / "conftest.py").write_text(MEAN_RANK)
    result = real.runpytest_subprocess("specs", "--qdq-json=record.json")
    result.assert_outcomes(passed=4, failed=1)  # other checks of the case are judged
    summary = result.stdout.str().partition("short test summary info")[2]
    assert "wrong.qdq.yaml::default::unknown - unknown metric 'mean_rang'" in summary
    result.stdout.fnmatch_lines(
        [
            "*wrong.qdq.yaml:11: unknown metric 'mean_rang' (did you mean 'mean_rank'?)",
            "*known: mean_rank, top1, top5, miou; define it in a fixture qdq_metrics of a conftest.py*",
            "wrong::default*unknown FAIL, 2 passed*",
        ]
    )
    accuracy = json.loads((real.path / "record.json").read_text())["cases"][0]["accuracy"]
    assert accuracy["mean_rank"]["reference"] <= 0
    assert accuracy["mean_rank"]["lost"] is None
    assert accuracy["top3"]["lost"] is not None


def test_the_runtimes_of_a_matrix_are_timed_together_at_the_end(real):
    spec = SPEC.replace("tune: {trials: 2}", "tune: {trials: 1}\nmatrix: {backend: [onnxruntime, fake]}")
    (real.path / "specs" / "a.qdq.yaml").write_text(spec)
    result = real.runpytest_subprocess(
        "specs", "-k", "size", "--qdq-json=record.json", "--qdq-report=page.html"
    )
    result.assert_outcomes(passed=2, deselected=4)
    record = json.loads((real.path / "record.json").read_text())
    assert [case["backend"] for case in record["cases"]] == ["onnxruntime", "fake"]
    (found,) = record["runtimes"]
    assert found["reference"] in ("onnxruntime float", "fake float")
    result.stdout.fnmatch_lines(["Runtimes of a *", "*fastest that meets the accuracy limits: *"])
    assert "Runtimes of a" in (real.path / "page.html").read_text()


def test_pytest_runs_the_spec_of_init(pytester, models):
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    # integers so fast that full quantization passes, however few builds the time limit allows
    (pytester.path / "pyproject.toml").write_text(
        '[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend_option = ["fake.integer=0.5"]\n'
    )
    assert main(["init", "digits_resnet.onnx", "--backend=fake"]) == 0
    options = ("-W", "error", "--qdq-backend=fake", "--qdq-time-limit=3s")
    run = pytester.runpytest_subprocess("digits_resnet.qdq.yaml", *options)
    run.assert_outcomes(passed=2)


CLOCK_SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 4, minutes: 5}
checks: [{kind: size, max_ratio: 2}]
"""
# Two consecutive calls return times that are hours apart, in either order.
JUMPING = """\
import itertools
import time

_real, _jumps = time.time, itertools.cycle((0, -5 * 3600, 7 * 3600, 90 * 86400, -400 * 86400))
time.time = lambda: _real() + next(_jumps)
"""
HOUR = 3600.0


def test_search_and_cache_are_unaffected_by_jumps_of_the_clock(simulated):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(CLOCK_SPEC)
    (simulated.path / "conftest.py").write_text(JUMPING)
    for source in ("measured", "cached"):
        words = (".", "--qdq-time-limit=10m", "--qdq-json=record.json")
        simulated.runpytest_subprocess(*words).assert_outcomes(passed=1)
        record = json.loads((simulated.path / "record.json").read_text())
        (case,) = record["cases"]
        assert 0 < record["seconds"] < HOUR
        assert all(0 <= trial["build_seconds"] < HOUR for trial in case["trials"]["list"])
        assert case["trials"]["total"] == 4, "no budget is exhausted"
        assert case["search"]["provenance"]["source"] == source
    assert 0 <= case["search"]["provenance"]["age_seconds"] < 500 * 24 * HOUR, "at most the jump of the clock"


NAMED_SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
title: of {folder}
tune: {{trials: 1}}
checks: [{{kind: size, max_ratio: 2}}, {{kind: regression, max: 50%}}]
"""


@pytest.mark.usefixtures("engine_threads")
def test_specs_of_one_name_have_separate_results_and_baselines(simulated):
    for folder in ("a", "b"):
        shutil.copytree(simulated.path / "specs", simulated.path / folder)
        (simulated.path / folder / "net.qdq.yaml").write_text(NAMED_SPEC.format(folder=folder))
    result = simulated.runpytest_inprocess("a", "b", "--qdq-update=new", "--qdq-report=page.html")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["a/net::default *", "b/net::default *"])
    assert "<h2>b/net::default</h2>" in (simulated.path / "page.html").read_text()
    # A run of one spec writes to its folder and uses its cached winner.
    simulated.runpytest_inprocess("b").assert_outcomes(passed=2)
    for folder, name in (("a", "net"), ("b", "net.b")):
        assert (simulated.path / folder / "__baselines__" / "net" / "fake.json").is_file()
        written = json.loads((simulated.path / "reports" / name / "default" / "result.json").read_text())
        assert written["title"] == f"of {folder}"
