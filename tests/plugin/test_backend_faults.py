"""Pytest runs with a backend that crashes, hangs or runs out of memory: they end, and the next run continues."""

from __future__ import annotations

import json

import pytest

SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
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
def project(simulated):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(SPEC)
    return simulated


def run(project, *words):
    options = ["--qdq-build-limit=2s", *(f"--qdq-backend-option=fake.{word}" for word in words)]
    result = project.runpytest_inprocess(".", "--qdq-json=record.json", *options)
    record = project.path / "record.json"
    return result, json.loads(record.read_text()) if record.exists() else None


@pytest.mark.parametrize(("fault", "stage"), STAGES)
def test_faults_of_the_backend_on_some_candidates_are_failed_trials(project, fault, stage):
    """Failing candidates are failed trials with a reason; the search continues, and the next run uses its result."""
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
def test_a_fault_of_the_backend_on_every_model_fails_the_checks(project, fault, stage):
    """The reference cannot be built either, so each check has one message without a traceback."""
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
