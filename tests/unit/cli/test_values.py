"""The verbs on a model with an input fixed to a value, and a function in a branch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graph_text import saved
from random_models import ranges_for

from qdqspec.graph.given import given_model
from qdqspec.graph.model import load_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile, write_scheme
from qdqspec.types import Consumer, Placement, Site

TEXT = """g (float[n,4,8,8] x, int64 rate) => (float[n,4,8,8] y) <int64 wide = {16000}> {
  is_wide = Equal(rate, wide)
  [gate] y = If (is_wide) <
    then_branch = yes () => (t) { [block] t = local.block(x, w) },
    else_branch = no () => (e) { d = Neg(x)  e = Relu(d) }
  >
}
<domain: "local", opset_import: ["": 17]> block (x, w) => (y) {
  [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
  [relu] y = Relu(c)
}"""
CONV = "block/conv"
VALUES = ("--values", "rate:16000")


@pytest.fixture
def files(tmp_path: Path, verb) -> Path:
    """``rates.onnx``, a scheme for it at 16000, and ``tuned.onnx`` made of both."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 4, 3, 3)).astype(np.float32)
    path = saved(tmp_path / "rates.onnx", TEXT, opset=17, ir_version=8, w=weights)
    sites = (
        Site(tensor="x", consumers=(Consumer(CONV, 0),), format="uint8"),
        Site(tensor="w", consumers=(Consumer(CONV, 1),), format="int8", weight=True),
    )
    given, placement = given_model(path, {"rate": 16000}), Placement(sites=frozenset(sites))
    numbers = Quantizer(given, ranges_for(given)).placed(placement)
    write_scheme(tmp_path / "scheme.json", SchemeFile(backend="onnxruntime-cpu", pairs=numbers))
    np.savez(tmp_path / "data.npz", x=random.uniform(-1, 1, size=(2, 1, 4, 8, 8)).astype(np.float32))
    applied = verb("apply", "rates.onnx", "scheme.json", "-o", "tuned.onnx", *VALUES)
    assert applied.code == 0, applied.err
    return tmp_path


def test_the_model_at_the_value_is_inspected_linted_applied_imported_and_stripped(files: Path, verb) -> None:
    def run(*words: str) -> None:
        result = verb(*words, *VALUES)
        assert result.code == 0, result.out + result.err

    shown = verb("inspect", "rates.onnx", "--json", *VALUES).json
    assert {node for region in shown["regions"] for node in region["nodes"]} == {CONV, "block/relu"}
    run("lint", "rates.onnx", "--target", "onnxruntime-cpu")
    tuned = load_model(files / "tuned.onnx")
    assert tuned.inputs == ("x",)
    assert sum(node.op_type == "DequantizeLinear" for node in tuned.nodes) == 2
    assert verb("apply", "rates.onnx", "scheme.json", "-o", "out.onnx", "--values", "rate:8000").code == 2
    assert not (files / "out.onnx").exists()
    run("import", "tuned.onnx", "-o", "again.json", "--reference", "rates.onnx")
    run("apply", "rates.onnx", "again.json", "-o", "again.onnx")
    assert verb("diff", "tuned.onnx", "again.onnx").code == 0
    run("strip", "tuned.onnx", "-o", "back.onnx", "--reference", "rates.onnx")
    given = given_model(files / "rates.onnx", {"rate": 16000})
    np.testing.assert_array_equal(load_model(files / "back.onnx").array("w"), given.array("w"))


def test_verify_runs_the_original_with_the_value(files: Path, verb) -> None:
    result = verb("verify", "rates.onnx", "tuned.onnx", "--data", "data.npz", *VALUES)
    assert result.code == 0, result.err
    np.savez(
        files / "input.npz", x=np.random.default_rng(1).uniform(-1, 1, (1, 1, 4, 8, 8)).astype(np.float32)
    )
    probed = verb("verify", "rates.onnx", "tuned.onnx", "--input", "input.npz", *VALUES, "--min-sqnr-db", "5")
    assert probed.code == 0, probed.out + probed.err
    assert verb("verify", "rates.onnx", "tuned.onnx", "--input", "input.npz").code == 2


@pytest.mark.parametrize("more", [(), ("--culprits",), ("--reference", "rates.onnx")])
def test_explain_reads_the_models_at_the_value(files: Path, verb, more: tuple[str, ...]) -> None:
    result = verb("explain", "tuned.onnx", "--data", "data.npz", *VALUES, *more)
    assert result.code == 0, result.err
    assert CONV in result.out
    noted = "tuned.onnx has no input 'rate': it is assumed to have been fixed when the model was made"
    assert (noted in result.out) == ("--reference" not in more)
