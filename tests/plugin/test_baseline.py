"""``--qdq-baseline`` and ``--qdq-update`` with a real session on the simulated device."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.app.evidence.baselines import read_baseline

pytestmark = pytest.mark.usefixtures("engine_threads")
SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 2}
checks: [{kind: regression, max: 20%}]
"""
ITEM = "specs/a.qdq.yaml::default::regression"
FILE = "specs/__baselines__/a/fake.json"


@pytest.fixture
def real(simulated):
    """A project with one regression check on the simulated device."""
    (simulated.path / "specs" / "a.qdq.yaml").write_text(SPEC)
    simulated.file = simulated.path / FILE
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


def test_a_missing_baseline_is_a_skip_locally_and_a_failure_in_ci(real, monkeypatch):
    real.runpytest_inprocess("specs", "--qdq-baseline=require").assert_outcomes(failed=1)
    monkeypatch.setenv("CI", "false")
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
    assert not real.file.parent.parent.exists()
    result = real.runpytest_inprocess("specs", "--qdq-update=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--qdq-update: baselines are not written in CI*", "*--qdq-update-in-ci*"])
    result = real.runpytest_inprocess("specs", "--qdq-update=new", "--qdq-update-in-ci")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"Baseline: {FILE}", "  default::regression  new, 0.*"])


def test_a_slowdown_against_a_committed_baseline_fails(kept):
    assert json.loads(kept.file.read_text())["device"] == "fake"
    kept.runpytest_inprocess("specs").assert_outcomes(passed=1)
    scale_baseline(kept.file, 1.5)
    result = kept.runpytest_inprocess("specs", "--qdq-json=slower.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["* % slower than the baseline (95 %: *), allowed 20.0 %", "*measured twice*", "Reproduce with:"]
    )
    found = json.loads((kept.path / "slower.json").read_text())["cases"][0]["regression"]["regression"]
    assert (found["state"], found["looks"]) == ("compared", 2)
    assert found["file"] == "__baselines__/a/fake.json"
    assert found["change"]["builds"]["low"] > 1.2
    assert found["change"]["p_value"] < 0.01
    assert found["ratio"]["median"] > 1.2 * found["baseline"]["median"]
    result = kept.runpytest_inprocess("specs", "--qdq-update=changed")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  default::regression  ?.??? -> ?.??? (* %)"])
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


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadscope"]], ids=["one process", "workers"])
def test_obsolete_entries_are_reported_and_removed_once_by_a_whole_run_only(kept, workers):
    """Each worker collects the whole selection and runs a part of it; the controller writes once."""
    (kept.path / "specs" / "a.qdq.yaml").write_text(f"{SPEC}matrix: {{batch: [1, 8]}}\n")

    run_pytest = kept.runpytest_subprocess if workers else kept.runpytest_inprocess

    def run(*words):
        return run_pytest(*words, *workers).stdout

    def names():
        return [case for case, _ in read_baseline(kept.file).names()]

    run("specs", "--qdq-update=new").fnmatch_lines(
        [
            f"Baseline: {FILE}", "  b1::regression  new, *", "  b8::regression  new, *",
            f"Obsolete baseline: {FILE}: default::regression", "Remove with:", "  qdqspec baseline prune specs",
        ]
    )  # fmt: skip
    assert sorted(names()) == ["b1", "b8", "default"]
    for selection in () if workers else (["specs/a.qdq.yaml::b1"], ["-k", "b8"]):
        assert "Obsolete baseline" not in run(*selection, "--qdq-update=all").str()
        assert len(names()) == 3
    shown = run("specs", "--qdq-update=all").str()
    assert shown.count("Baseline: specs/") == 1
    assert shown.count("default::regression  removed, its spec does not ask for it") == 1
    assert sorted(names()) == ["b1", "b8"]


BLOCKED = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    (item.config.rootpath / "specs" / "__baselines__").write_text("a file, not a folder")
    return (yield)
"""


def test_a_baseline_that_cannot_be_written_fails_the_run(real):
    (real.path / "conftest.py").write_text(BLOCKED)
    result = real.runpytest_inprocess("specs", "--qdq-update=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*fake.json: the baseline cannot be written: *"])
