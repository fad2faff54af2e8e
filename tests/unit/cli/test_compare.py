"""``qdqspec compare``: exit codes, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import other_fake
import pytest


@pytest.fixture
def folders(verb, models, tmp_path, monkeypatch):
    """Results of one model on two simulated devices."""
    other_fake.install(monkeypatch, scale=0.5)
    words = ("--trials", "2", "--min-sqnr-db", "none", "-o", "out")
    assert verb("tune", models / "digits_resnet.onnx", "--backend", "fake,other", *words).code == 0
    return "out/fake", "out/other"


def test_the_slower_case_is_marked_in_table_and_json(verb, run_records, tmp_path):
    for name, text in zip(("a.json", "slower.json"), run_records, strict=True):
        (tmp_path / name).write_text(text)
    rows = verb("compare", "a.json", "slower.json").out.splitlines()
    assert (rows[2].split()[0], rows[2].split()[-1]) == ("squeezenet::default", "slower")
    assert rows[-1].endswith("1 slower, 2 same")
    found = verb("compare", "a.json", "slower.json", "--json", "--fail-on", "5%").json
    assert found["fail_on"] == 0.05
    assert [case["beyond"] for case in found["cases"]] == [True, False, False]


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
