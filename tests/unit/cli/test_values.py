"""The verbs on models with an input fixed to a value, functions, a network in a body, and float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_text import saved
from onnx import numpy_helper

from qdqspec.graph.given import given_model
from qdqspec.graph.model import load_model
from tests.support.changed_models import in_float16

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
def files(tmp_path: Path, verb, conv_scheme) -> Path:
    """``rates.onnx``, a scheme for it at 16000, and ``tuned.onnx`` made of both."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 4, 3, 3)).astype(np.float32)
    path = saved(tmp_path / "rates.onnx", TEXT, opset=17, ir_version=8, w=weights)
    conv_scheme(given_model(path, {"rate": 16000}), CONV)
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


# ---- a network in a body ---------------------------------------------------------------------------

BRANCHES = """g (float[1,8,8,8] x, bool c) => (float[1,8] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[1,8] p) {
            [conv] a = Conv<pads = [1,1,1,1]>(x, w) b = Relu(a)
            d = ReduceMean<axes = [2,3]>(b) p = Squeeze<axes = [2,3]>(d)
        },
        else_branch = e () => (float[1,8] q) { k = ReduceMax<axes = [2,3], keepdims = 0>(x) q = Tanh(k) }
    >
}"""
IN_BRANCH = "choice/then_branch/conv"


@pytest.fixture
def branches(tmp_path: Path, conv_scheme) -> Path:
    """The float model, a scheme with the two pairs of its convolution, and data that runs it."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(8, 8, 3, 3)).astype(np.float32)
    path = saved(tmp_path / "float.onnx", BRANCHES, opset=11, ir_version=6, w=weight)
    conv_scheme(load_model(path), IN_BRANCH)
    x = random.normal(size=(4, 1, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, c=np.ones(4, bool))
    return tmp_path


def outputs(path: Path, choice: bool) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).uniform(-0.5, 0.5, size=(1, 8, 8, 8)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x, "c": np.array(choice)})[0])


def test_pairs_in_bodies_are_applied_named_imported_stripped_linted_and_explained(
    branches: Path, verb
) -> None:
    def run(*words: str, code: int = 0) -> str:
        result = verb(*words)
        assert result.code == code, result.out + result.err
        return result.out

    run("apply", "float.onnx", "scheme.json", "-o", "tuned.onnx")
    made = load_model(branches / "tuned.onnx")
    assert made.opset == 13
    onnx.checker.check_model(made.proto, full_check=True)
    np.testing.assert_array_equal(
        outputs(branches / "float.onnx", False), outputs(branches / "tuned.onnx", False)
    )
    assert np.isfinite(outputs(branches / "tuned.onnx", True)).all()
    different = run("diff", "float.onnx", "tuned.onnx", code=1)
    assert f"x > {IN_BRANCH}:0" in different
    assert f"w > {IN_BRANCH}:1" in different
    run("import", "tuned.onnx", "-o", "again.json", "--reference", "float.onnx")
    run("apply", "float.onnx", "again.json", "-o", "again.onnx")
    run("diff", "tuned.onnx", "again.onnx")
    run("strip", "tuned.onnx", "--reference", "float.onnx", "-o", "back.onnx")
    for choice in (True, False):
        restored = outputs(branches / "back.onnx", choice)
        np.testing.assert_array_equal(outputs(branches / "float.onnx", choice), restored)
    run("lint", "tuned.onnx", "--target", "onnxruntime-cpu")
    assert IN_BRANCH in run("explain", "tuned.onnx", "--data", "data.npz")


# ---- float16 -------------------------------------------------------------------------------------


HALF = """<ir_version: 8, opset_import: ["": 17]> g (float[4,16] x) => (float[4,16] y) {
    a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, w) }"""
REPORTED = (
    "the model computes in float16, and the backend has no integer kernels for pairs of float16 tensors"
)


def test_the_conversion_is_reported(verb, tmp_path):
    proto = onnx.parser.parse_model(HALF)
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight / 4, "w"))
    onnx.save(in_float16(proto), tmp_path / "half.onnx")
    for word in ("inspect", "explain"):
        result = verb(word, "half.onnx")
        assert result.code == 0, result.err
        assert REPORTED in " ".join(result.out.split())
    for backend in ("onnxruntime", "fake"):
        assert verb("init", "half.onnx", "--backend", backend, "-o", f"{backend}.qdq.yaml").code == 0
        text = " ".join((tmp_path / f"{backend}.qdq.yaml").read_text().replace("#", "").split())
        assert (REPORTED in text) is (backend == "onnxruntime")
        assert "can run in integers: MatMul 2" in text
        assert "kind: speedup" in text
