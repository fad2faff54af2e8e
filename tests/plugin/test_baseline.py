"""``--qdq-baseline`` with a real session on the simulated device."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

pytestmark = pytest.mark.usefixtures("engine_threads")
SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 2}
checks: [{kind: regression, max: 20%}]
"""
ITEM = "specs/a.qdq.yaml::default::regression"


@pytest.fixture
def real(simulated):
    """A project with one regression check on the simulated device."""
    (simulated.path / "specs" / "a.qdq.yaml").write_text(SPEC)
    simulated.file = simulated.path / "specs" / "__baselines__" / "a" / "fake.json"
    return simulated


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder for the copy of the project with a measured baseline."""
    return tmp_path_factory.mktemp("measured") / "project"


@pytest.fixture
def kept(real, measured):
    """The project with a committed baseline, which is measured once for all tests."""
    if measured.exists():
        shutil.copytree(measured, real.path, dirs_exist_ok=True)
    else:
        real.runpytest_inprocess("specs", "--qdq-update=new").assert_outcomes(passed=1)
        shutil.copytree(real.path, measured)
    assert real.file.is_file()
    return real


def scale_baseline(file, factor):
    """Divide the times of the tuned model in the baseline by ``factor``."""
    data = json.loads(file.read_text())
    entry = data["cases"]["default"]["regression"]
    tuned = entry["samples"]["tuned"]
    for times in (tuned, tuned["first"]):
        for clock in ("wall_ms", "cpu_ms"):
            times[clock] = [[value / factor for value in build] for build in times[clock]]
    for bound in ("median", "low", "high"):
        entry["ratio"][bound] /= factor
    del entry["sum"]  # removes the checksum of the original
    file.write_text(json.dumps(data))


def evidence(project, option, *more):
    """The comparison with the baseline in the run record."""
    project.runpytest_inprocess("specs", option, *more)
    record = json.loads((project.path / option.partition("=")[2]).read_text())
    return record["cases"][0]["regression"]["regression"]


def test_a_missing_baseline_is_a_skip_locally_and_a_failure_in_ci(real, monkeypatch):
    result = real.runpytest_inprocess("specs", "-rs")
    result.assert_outcomes(skipped=1)
    command = f"pytest {ITEM} --qdq-backend=fake --qdq-update=new"
    result.stdout.fnmatch_lines(
        [f"SKIPPED*inconclusive: no baseline of this check on this device; run: {command}"]
    )
    monkeypatch.setenv("CI", "true")
    result = real.runpytest_inprocess("specs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["no baseline of this check on this device", f"*pytest {ITEM}*--qdq-update=new --qdq-update-in-ci*"]
    )
    real.runpytest_inprocess("specs", "--qdq-baseline=warn").assert_outcomes(skipped=1)
    monkeypatch.setenv("CI", "false")
    real.runpytest_inprocess("specs", "--qdq-baseline=require").assert_outcomes(failed=1)


def test_a_slowdown_against_a_committed_baseline_fails(kept):
    assert json.loads(kept.file.read_text())["device"] == "fake"
    kept.runpytest_inprocess("specs").assert_outcomes(passed=1)
    scale_baseline(kept.file, 1.5)
    result = kept.runpytest_inprocess("specs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["* % slower than the baseline (95 %: *), allowed 20.0 %", "*measured twice*", "Reproduce with:"]
    )
    found = evidence(kept, "--qdq-json=slower.json")
    assert (found["state"], found["looks"]) == ("compared", 2)
    assert found["file"] == "__baselines__/a/fake.json"
    assert found["change"]["builds"]["low"] > 1.2
    assert found["change"]["p_value"] < 0.01
    assert found["ratio"]["median"] > 1.2 * found["baseline"]["median"]
    kept.runpytest_inprocess("specs", "--qdq-update=changed").assert_outcomes(passed=1)
    kept.runpytest_inprocess("specs").assert_outcomes(passed=1)


def test_a_stale_baseline_passes_and_warns(kept):
    scale_baseline(kept.file, 0.5)
    result = kept.runpytest_inprocess("specs")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"warning: a::default: *is stale*pytest {ITEM}*--qdq-update=changed"])


def test_a_damaged_baseline_fails_in_every_mode(kept):
    kept.file.write_text(kept.file.read_text()[:-200])
    for mode in ("run", "measure", "verify"):
        result = kept.runpytest_inprocess("specs", f"--qdq-mode={mode}", "--qdq-baseline=warn")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["damaged baseline fake.json: *", "*__baselines__/a/fake.json*"])
        result.stdout.fnmatch_lines(
            ["Restore it from version control*--qdq-update=changed.", "*regression FAIL*"]
        )


def test_the_changed_nodes_of_a_model_are_named(kept):
    """The file alone shows what changed: the model that was measured is not in the project any more."""
    file = kept.path / "specs" / "digits_resnet.onnx"
    model = onnx.load(file)
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    (node,) = [node for node in model.graph.node if weight.name in node.input]
    onnx.save(model, file)
    result = kept.runpytest_inprocess("specs", "--qdq-baseline=require")
    result.assert_outcomes(failed=1)
    name = f"{node.op_type} '{node.name}' (weights)"
    result.stdout.fnmatch_lines(
        [
            "*the baseline is not comparable: model: 1 node changed*",
            f"*why*model was *, is *: 1 node changed: {name}; 1 constant changed*",
        ]
    )
    kept.runpytest_inprocess("specs", "--qdq-update=changed").assert_outcomes(passed=1)
    found = json.loads(kept.file.read_text())
    (changed,) = found["cases"]["default"]["regression"]["changed"]
    assert name in changed
    assert len(found["models"]) == 1
