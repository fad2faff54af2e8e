"""A backend that crashes, hangs or runs out of memory, through a whole pytest run: it ends, and the next goes on."""

from __future__ import annotations

import json
import shutil

import pytest

SPEC = """\
qdqspec: 1
model: net.onnx
tune: {trials: 5}
checks: [{kind: size, max_ratio: 2}, {kind: parity, min_sqnr_db: 1}]
"""
SAID = {
    "crash": "*net.onnx: the engine's process was killed by SIGSEGV during 'time'; the end of its log:",
    "oom": "*net.onnx: the backend ran out of memory*",
    "hang": "*net.onnx: the engine gave no answer to 'build' for 2 s and was ended*",
}
STAGES = [("crash", "time"), ("oom", "build"), ("hang", "build")]


@pytest.fixture
def project(pytester, models):
    (pytester.path / "pyproject.toml").write_text('[tool.qdqspec]\nbackend = "fake"\n')
    shutil.copy(models / "digits_resnet.onnx", pytester.path / "net.onnx")
    (pytester.path / "net.qdq.yaml").write_text(SPEC)
    return pytester


def run(project, *words):
    options = ["--qdq-build-limit=2s", *(f"--qdq-backend-option=fake.{word}" for word in words)]
    result = project.runpytest_inprocess(".", "--qdq-json=record.json", *options)
    record = project.path / "record.json"
    return result, json.loads(record.read_text()) if record.exists() else None


@pytest.mark.parametrize(("fault", "stage"), STAGES)
def test_some_candidates_break_the_backend(project, fault, stage):
    """They are failed trials with their reason; the others are searched, and the next run takes what was found."""
    faulty = (f"{fault}={stage}", "fault_rate=0.6", "seed=3")
    result, record = run(project, *faulty)
    result.assert_outcomes(passed=2)
    trials = record["cases"][0]["trials"]
    failed = [trial for trial in trials["list"] if trial["status"] == "failed"]
    assert trials["failed"] == len(failed) > 0
    assert trials["built"] > 0
    assert all(trial["error"] for trial in failed)
    again, record = run(project, *faulty)
    again.assert_outcomes(passed=2)
    assert record["cases"][0]["search"]["provenance"]["source"] == "cached"


@pytest.mark.parametrize(("fault", "stage"), STAGES)
def test_every_model_breaks_the_backend(project, fault, stage):
    """The reference too, so nothing can be judged: one clear message each check, and no traceback."""
    result, record = run(project, f"{fault}={stage}")
    result.assert_outcomes(failed=2)
    (case,) = record["cases"]
    assert case["search"] is None
    assert [check["verdict"] for check in case["checks"]] == ["fail", "fail"]
    assert all(check["headline"].startswith("not judged: ") for check in case["checks"])
    out = result.stdout.str()
    assert "Traceback" not in out
    result.stdout.fnmatch_lines([SAID[fault]])
    result, record = run(project)
    result.assert_outcomes(passed=2)
    assert record["cases"][0]["trials"]["failed"] == 0
