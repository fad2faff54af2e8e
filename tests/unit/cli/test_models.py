"""``inspect``, ``apply`` and ``strip`` on a real model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_text import saved
from refused_models import mixed_float_types


@pytest.fixture
def model(models, tmp_path):
    path = tmp_path / "digits.onnx"
    path.write_bytes((models / "digits_resnet.onnx").read_bytes())
    return path


def test_inspect_prints_the_regions_and_patterns(verb, model):
    result = verb("inspect", model)
    assert result.code == 0
    assert "quantizable on onnxruntime:" in result.out
    assert len(verb("inspect", model, "--verbose").out) > len(result.out)
    assert len(verb("inspect", model, "--lines", "2").out) < len(result.out)
    regions, patterns = (verb("inspect", model, word).out for word in ("--regions", "--patterns"))
    assert ("r0 ROOT" in regions, "Patterns" in regions) == (True, False)
    assert ("r0 ROOT" in patterns, "Patterns" in patterns) == (False, True)


def test_inspect_has_an_option_for_the_size_of_regions(verb, model):
    def leaves(*words):
        found = verb("inspect", model, "--json", *words).json
        sizes = [len(region["nodes"]) for region in found["regions"] if region["type"] == "LEAF"]
        assert sum(sizes) == found["coverage"]["nodes"] >= found["coverage"]["quantizable"] > 0
        return sizes

    assert max(leaves("--max-nodes", "3")) < max(leaves())
    assert verb("inspect", model, "--max-nodes", "0").code == 2


def test_inspect_counts_at_the_shapes_of_data_or_states_assumed_ones(verb, tmp_path):
    text = "net (float[n,steps,4] x) => (float[n,steps,4] y) { y = MatMul(x, w) }"
    saved(tmp_path / "net.onnx", text, w=np.ones((4, 4), np.float32))
    np.savez(tmp_path / "data.npz", x=np.ones((2, 30, 4), np.float32))
    assert "unknown sizes taken as 1: 'n', 'steps'" in verb("inspect", "net.onnx").out
    np.savez(tmp_path / "other.npz", y=np.ones((2, 30, 4), np.float32))
    named = "{arrays: other.npz, names: {x: y}}"
    given = (("--data", "data.npz"), ("--data", "dat*.npz"), ("--data", named), ("--shapes", "x:1x30x4"))
    for words in given:
        found = verb("inspect", "net.onnx", "--json", *words).json["forecast"]
        assert (found["multiplications"], found["assumed"]) == (30 * 16, [])


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("apply digits.onnx scheme.json", "./digits.onnx"),
        ("apply digits.onnx scheme.json", "scheme.json"),
        ("strip digits.onnx", "digits.onnx"),
        ("fold digits.onnx", "digits.onnx"),
        ("strip net.onnx", "net.bin"),
        ("apply net.onnx scheme.json", "net.bin"),
    ],
)
def test_an_input_is_never_overwritten(verb, model, tmp_path, words, target):
    """The file of external weights is one of them."""
    (tmp_path / "scheme.json").write_text('{"schema_version": 1, "backend": "onnxruntime", "sites": []}')
    external = {"save_as_external_data": True, "location": "net.bin", "size_threshold": 0}
    onnx.save_model(onnx.load(model), tmp_path / "net.onnx", **external)
    before = (tmp_path / target).read_bytes()
    result = verb(*words.split(), "-o", target)
    assert result.code == 2
    assert "overwrite the input" in result.err
    assert (tmp_path / target).read_bytes() == before


def test_a_written_model_that_is_not_valid_is_a_warning(verb, tmp_path):
    """The float types of data and weight differ, also once the pairs are removed (Model-Optimizer#2314)."""
    given = mixed_float_types(tmp_path / "mixed.onnx")
    stripped = verb("strip", given, "-o", "float.onnx", "--json")
    (warning,) = stripped.json["warnings"]
    assert warning.startswith("float.onnx: the model is not valid ONNX: ")
    assert "W has inconsistent type tensor(float)" in warning
    assert f"warning: {warning}" in stripped.err
    assert (
        "warning: folded.onnx: the model is not valid ONNX: " in verb("fold", given, "-o", "folded.onnx").err
    )
