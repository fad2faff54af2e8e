"""``inspect``, ``apply`` and ``strip`` on a real model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from refused_models import mixed_float_types

from qdqspec.graph.model import load_model


def digest(path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def model(models, tmp_path):
    path = tmp_path / "digits.onnx"
    path.write_bytes((models / "digits_resnet.onnx").read_bytes())
    return path


@pytest.fixture
def scheme(model, tmp_path):
    """A scheme of one activation and one weight of the first convolution, written by hand."""
    conv = next(node for node in load_model(model).nodes if node.op_type == "Conv")
    rows = [(conv.inputs[0], 0, "uint8", 0.05, 128), (conv.inputs[1], 1, "int8", 0.01, 0)]
    sites = [
        {
            "tensor": tensor, "consumers": [{"node": conv.name, "input": index}], "format": dtype,
            "scale": scale, "zero_point": zero, "axis": None, "weight": index == 1,
        }
        for tensor, index, dtype, scale, zero in rows
    ]  # fmt: skip
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps({"schema_version": 1, "backend": "onnxruntime", "sites": sites}))
    return path


def test_inspect_prints_the_regions(verb, model):
    result = verb("inspect", model)
    assert result.code == 0
    assert "r0 ROOT" in result.out
    assert "quantizable on onnxruntime:" in result.out
    assert len(verb("inspect", model, "--verbose").out) > len(result.out)
    assert len(verb("inspect", model, "--lines", "2").out) < len(result.out)


def test_inspect_has_an_option_for_the_size_of_regions(verb, model):
    def leaves(*words):
        found = verb("inspect", model, "--json", *words).json
        sizes = [len(region["nodes"]) for region in found["regions"] if region["type"] == "LEAF"]
        assert sum(sizes) == found["coverage"]["nodes"] >= found["coverage"]["quantizable"] > 0
        return sizes

    assert max(leaves("--max-nodes", "3")) < max(leaves())
    assert verb("inspect", model, "--max-nodes", "0").code == 2


def test_inspect_prints_only_the_requested_parts(verb, model):
    regions, patterns = (verb("inspect", model, word).out for word in ("--regions", "--patterns"))
    assert "r0 ROOT" in regions
    assert "r0 ROOT" not in patterns
    assert "Patterns" in patterns
    assert "Patterns" not in regions
    assert "Leaf sizes" not in regions + patterns


def test_inspect_counts_at_the_shapes_of_data_or_states_assumed_ones(verb, tmp_path):
    text = (
        '<ir_version: 8, opset_import: ["": 17]> '
        "net (float[n,steps,4] x) => (float[n,steps,4] y) { y = MatMul(x, w) }"
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    onnx.save(proto, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((2, 30, 4), np.float32))
    assert "unknown sizes taken as 1: 'n', 'steps'" in verb("inspect", "net.onnx").out
    np.savez(tmp_path / "other.npz", y=np.ones((2, 30, 4), np.float32))
    named = "{arrays: other.npz, names: {x: y}}"
    for words in (
        ("--data", "data.npz"),
        ("--data", "dat*.npz"),
        ("--data", named),
        ("--shapes", "x:1x30x4"),
    ):
        found = verb("inspect", "net.onnx", "--json", *words).json["forecast"]
        assert (found["multiplications"], found["assumed"]) == (30 * 16, [])


def test_apply_then_strip_restores_the_model(verb, model, scheme, tmp_path):
    before = digest(model)
    applied = verb("apply", model, scheme, "-o", "q.onnx", "--json")
    assert (applied.code, applied.json["pairs"]) == (0, 2)
    assert (applied.json["warnings"], applied.err) == ([], "")
    quantized = load_model(tmp_path / "q.onnx")
    assert sum(node.op_type == "DequantizeLinear" for node in quantized.nodes) == 2
    stripped = verb("strip", "q.onnx", "-o", "s.onnx", "--reference", model)
    assert stripped.code == 0
    assert "2 dequantized tensors removed" in stripped.out
    assert [n.name for n in load_model(tmp_path / "s.onnx").nodes] == [
        n.name for n in load_model(model).nodes
    ]
    assert digest(model) == before


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("apply digits.onnx scheme.json", "./digits.onnx"),
        ("apply digits.onnx scheme.json", "scheme.json"),
        ("strip digits.onnx", "digits.onnx"),
        ("fold digits.onnx", "digits.onnx"),
    ],
)
def test_an_input_is_never_overwritten(verb, model, scheme, words, target):
    before = digest(model), digest(scheme)
    result = verb(*words.split(), "-o", target)
    assert result.code == 2
    assert "overwrite the input" in result.err
    assert (digest(model), digest(scheme)) == before


@pytest.mark.parametrize("words", [["strip", "net.onnx"], ["apply", "net.onnx", "scheme.json"]])
def test_the_file_of_external_weights_is_not_overwritten(verb, model, scheme, tmp_path, words):
    net = onnx.load(model)
    onnx.save_model(
        net, tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0
    )
    before = (tmp_path / "net.bin").read_bytes()
    result = verb(*words, "-o", "net.bin")
    assert result.code == 2
    assert "the output would overwrite the input" in result.err
    assert (tmp_path / "net.bin").read_bytes() == before


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
