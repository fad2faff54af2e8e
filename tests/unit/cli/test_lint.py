"""``lint`` from the command line."""

from __future__ import annotations

import pytest
from graph_text import saved
from refused_models import mixed_float_types, pair_that_no_build_takes


@pytest.fixture
def model(tmp_path):
    """Writes a model with one pair of this zero point."""

    def write(zero: str) -> str:
        text = """g (float[4,16] x) => (float[4,16] y) <float s = {0.1}, %s> {
          q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  y = Neg(a) }"""
        return str(saved(tmp_path / "pair.onnx", text % zero, opset=21, ir_version=10))

    return write


def test_slow_findings_fail_only_if_strict(verb, model):
    words = ["lint", model("int8 z = {0}"), "--target", "tensorrt-11"]
    assert verb(*words).code == 0
    assert "slow TRT042" in verb(*words).out
    assert verb(*words, "--strict").code == 1


def test_json_has_findings_of_several_targets(verb, model):
    words = ["--target", "tensorrt-10", "--target", "onnxruntime-cpu", "--json"]
    result = verb("lint", model("uint8 z = {9}"), *words)
    assert result.code == 1
    assert result.json["schema_version"] == 1
    assert list(result.json["targets"]) == ["tensorrt-10", "onnxruntime-cpu"]
    first = result.json["targets"]["tensorrt-10"][0]
    assert first.keys() == {"id", "severity", "node", "message", "title", "cure", "source"}
    assert (first["id"], first["severity"]) == ("TRT001", "refused")


def test_the_runtime_of_the_target_loads_the_model(verb, tmp_path):
    """It refuses this one, whose nodes the static rules accept; without the option it is not loaded."""
    path = pair_that_no_build_takes(tmp_path / "pair.onnx")
    words = ["lint", path, "--target", "onnxruntime-cpu", "--json"]
    unloaded = verb(*words, "--no-load")
    assert unloaded.code == 0
    assert "; static rules only, not loaded: not asked for" in unloaded.json["text"]
    found = verb(*words)
    load = found.json["loads"]["onnxruntime-cpu"]
    if load["loaded"]:
        pytest.skip("this ONNX Runtime optimizes the model to one that it can load")
    assert found.code == 1
    assert "refused RUN001" in found.json["text"]
    assert load["note"] == f"{load['runtime']} refused it"
    assert f"; {load['note']}\n" in found.json["text"]


def test_onnx_checker_judges_a_model_for_a_target_without_its_runtime(verb, tmp_path):
    result = verb("lint", mixed_float_types(tmp_path / "mixed.onnx"), "--target", "tensorrt-10.9", "--json")
    assert result.code == 1
    assert "refused ONX001" in result.json["text"]
    load = result.json["loads"]["tensorrt-10.9"]
    assert not load["loaded"]
    assert load["note"].startswith("static rules only, not loaded: tensorrt")
