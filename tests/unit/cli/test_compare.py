"""``compare``: exit codes, table and JSON; ``upgrade-check`` with a second interpreter and a changed runtime."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import other_fake
import pytest

from qdqspec.app.report.record import record_to_json
from qdqspec.app.upgrade import judge_upgrade
from qdqspec.backends import Availability
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.testing.records import sample_run
from qdqspec.types import DeviceKey, Interval, Upgrade


@pytest.fixture
def folders(verb, models, tmp_path, monkeypatch):
    """Results of one model on two simulated devices."""
    other_fake.install(monkeypatch, scale=0.5)
    words = ("--trials", "2", "--min-sqnr-db", "none", "-o", "out")
    assert verb("tune", models / "digits_resnet.onnx", "--backend", "fake,other", *words).code == 0
    return "out/fake", "out/other"


def test_the_slower_case_is_marked_in_table_and_json(verb, tmp_path):
    data = record_to_json(sample_run())
    (tmp_path / "a.json").write_text(json.dumps(data))
    tuned = data["cases"][0]["tuned"]["samples"]
    for clock in ("wall_ms", "cpu_ms"):
        tuned[clock] = [1.2 * value for value in tuned[clock]]
    (tmp_path / "slower.json").write_text(json.dumps(data))
    slower = verb("compare", "a.json", "slower.json")
    assert slower.code == 1
    assert verb("compare", "a.json", "slower.json", "--fail-on", "300%").code == 0
    rows = slower.out.splitlines()
    assert (rows[2].split()[0], rows[2].split()[-1]) == ("squeezenet::default", "slower")
    assert rows[-1].endswith("1 slower, 2 same")
    found = verb("compare", "a.json", "slower.json", "--json", "--fail-on", "5%").json
    assert found["fail_on"] == 0.05
    assert [case["beyond"] for case in found["cases"]] == [True, False, False]


def test_runs_without_a_case_that_both_timed_are_not_compared(verb, tmp_path):
    run = sample_run()
    (tmp_path / "a.json").write_text(json.dumps(record_to_json(run)))
    cases = tuple(replace(case, evidence=replace(case.evidence, latency=None)) for case in run.cases)
    (tmp_path / "failed.json").write_text(json.dumps(record_to_json(replace(run, cases=cases))))
    found = verb("compare", "a.json", "failed.json")
    assert found.code == 2
    assert found.out.splitlines()[-1].endswith("3 not timed")


def test_folders_of_several_runtimes_are_timed_together(verb, folders):
    (found,) = verb("compare", *folders, "--json").json["runtimes"]
    assert found["reference"] == "other float"
    ratios = {f"{m['backend']} {m['model']}": m["ratio"]["median"] for m in found["models"]}
    assert ratios["other float"] == 1
    assert ratios["fake float"] > 1.5  # a device of half the speed, with other kernels
    for model in (each for each in found["models"] if each["model"] == "tuned"):
        placed = json.loads(Path("out", model["backend"], "result.json").read_text())["placement"]
        assert model["pairs"] == sum(not pair["weight"] for pair in placed), "as in the table of the search"
    text = verb("compare", *folders)
    assert text.code == 0, text.err
    assert text.out.startswith("Runtimes of digits_resnet ("), "the name of a case is that of one runtime"
    assert "fastest that meets the accuracy limits: " in text.out


def test_folders_of_a_dynamic_model_are_timed_at_the_tuned_shapes(verb, models, tmp_path, monkeypatch):
    """The folders do not contain the data from which the shapes follow."""
    model = onnx.load(models / "digits_resnet.onnx")
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = f"d{dim.dim_value}"
    onnx.save(model, "dynamic.onnx")
    np.savez("data.npz", **{model.graph.input[0].name: np.ones((4, 1, 16, 16), np.float32)})
    other_fake.install(monkeypatch, scale=0.5)
    words = ("--trials", "2", "--min-sqnr-db", "none", "--calibration", "data.npz", "-o", "out")
    assert verb("tune", "dynamic.onnx", "--backend", "fake,other", *words).code == 0
    found = verb("compare", "out/fake", "out/other", "--json")
    assert found.code == 0, found.err
    assert (
        "inputs are random here; out/fake was tuned with calibration data: give it with --data" in found.err
    )
    for data in ("data.npz", "{arrays: data.npz}"):
        given = verb("compare", "out/fake", "out/other", "--data", data)
        assert (given.code, "random" in given.err) == (0, False), given.err
    result = json.loads((tmp_path / "out" / "fake" / "result.json").read_text())
    assert [shape["opt"] for shape in result["profiles"][0]["shapes"].values()] == [[1, 1, 16, 16]]


def test_folders_of_one_runtime_or_several_models_are_refused(verb, models, folders, tmp_path):
    same = verb("compare", folders[0], folders[0])
    assert (same.code, "are of one runtime" in same.err) == (2, True)
    assert "tune --report run.json" in same.err, "the message names the comparison of two runs of one runtime"
    result = tmp_path / "out" / "other" / "result.json"
    result.write_text(result.read_text().replace('"sha256": "', '"sha256": "0'))
    different = verb("compare", *folders)
    assert (different.code, "are of different models" in different.err) == (2, True)
    absent = verb("compare", folders[0], "out")
    assert (absent.code, absent.err.count("result.json"), absent.err.count("No such file")) == (2, 1, 1)
    assert "name the folder of a case" in absent.err
    result.write_text("{}")
    damaged = verb("compare", *folders)
    assert (damaged.code, "this is no case record" in damaged.err) == (2, True)


# ---- upgrade-check -------------------------------------------------------------------------------


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


def test_a_fact_is_named_once_and_in_full(verb, tuned, python, monkeypatch):
    facts, details = {"runtime": "2.1-nightly", "int8 path": "VNNI"}, {"runtime": "2.1", "int8_path": "VNNI"}
    usable = Availability(usable=True, facts=facts)
    monkeypatch.setattr(FakeDevice, "probe", lambda *_: usable)
    monkeypatch.setattr(FakeDevice, "device", lambda *_: DeviceKey(key="fake", details=details))
    result = verb("upgrade-check", "a.qdq.yaml", "--backend", "fake", "--python", python(SAME), "--json")
    assert result.json["here"]["fake"] == facts


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


def test_a_folder_tuned_with_other_options_is_noted(verb, tuned, python):
    record = Path("reports/a/default/result.json")
    made = json.loads(record.read_text())
    made["device"]["details"]["threads"] = "2"
    record.write_text(json.dumps(made))
    result = verb("upgrade-check", "reports/a/default", "--python", python(SAME))
    assert result.code == 0, result.err
    assert "reports/a/default was tuned with threads 2; here: threads by default" in result.err


def interval(low: float, median: float, high: float) -> Interval:
    return Interval(low=low, median=median, high=high)


@pytest.mark.parametrize("limit", [20.0, None])
@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"change": interval(1.04, 1.08, 1.12)}, "slower"),
        ({"change": interval(0.98, 1.08, 1.2)}, "ok"),  # not significant
        ({"change": interval(1.01, 1.03, 1.05)}, "ok"),  # allowed
        ({"ratio_there": interval(1.01, 1.1, 1.2)}, "slower than float"),
        ({"sqnr_here_db": 25.0, "sqnr_there_db": 19.0}, "less accurate"),
        ({"sqnr_here_db": -3.4, "sqnr_there_db": -3.5}, "ok"),  # the inputs are random
        ({"sqnr_here_db": 25.0, "sqnr_there_db": 24.5}, "ok"),
    ],
)
def test_which_changes_are_regressions(fields, state, limit):
    found = Upgrade(case="a::b", backend="fake", state="ok", **fields)
    assert judge_upgrade(found, 0.05, limit)[0] == state


def test_within_an_accuracy_limit_a_model_may_lose_more():
    found = Upgrade(case="a::b", backend="fake", state="ok", sqnr_here_db=25.0, sqnr_there_db=21.0)
    assert judge_upgrade(found, 0.05, 20.0)[0] == "ok"
    assert judge_upgrade(found, 0.05, None) == (
        "less accurate",
        "SQNR 21.0 dB there (25.0 here), 1 dB less is allowed",
    )
