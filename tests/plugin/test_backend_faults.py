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
