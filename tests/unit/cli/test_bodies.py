"""The commands on a model of opset 11 whose network is in a body of an If."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_text import saved

from qdqspec.graph.model import load_model

TEXT = """g (float[1,8,8,8] x, bool c) => (float[1,8] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[1,8] p) {
            [conv] a = Conv<pads = [1,1,1,1]>(x, w) b = Relu(a)
            d = ReduceMean<axes = [2,3]>(b) p = Squeeze<axes = [2,3]>(d)
        },
        else_branch = e () => (float[1,8] q) { k = ReduceMax<axes = [2,3], keepdims = 0>(x) q = Tanh(k) }
    >
}"""
CONV = "choice/then_branch/conv"


@pytest.fixture
def files(tmp_path: Path, conv_scheme) -> Path:
    """The float model, a scheme with the two pairs of its convolution, and data that runs it."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(8, 8, 3, 3)).astype(np.float32)
    path = saved(tmp_path / "float.onnx", TEXT, opset=11, ir_version=6, w=weight)
    conv_scheme(load_model(path), CONV)
    x = random.normal(size=(4, 1, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, c=np.ones(4, bool))
    return tmp_path


def outputs(path: Path, choice: bool) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).uniform(-0.5, 0.5, size=(1, 8, 8, 8)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x, "c": np.array(choice)})[0])


def test_pairs_in_bodies_are_applied_named_imported_stripped_linted_and_explained(files: Path, verb) -> None:
    def run(*words: str, code: int = 0) -> str:
        result = verb(*words)
        assert result.code == code, result.out + result.err
        return result.out

    run("apply", "float.onnx", "scheme.json", "-o", "tuned.onnx")
    made = load_model(files / "tuned.onnx")
    assert made.opset == 13
    onnx.checker.check_model(made.proto, full_check=True)
    np.testing.assert_array_equal(outputs(files / "float.onnx", False), outputs(files / "tuned.onnx", False))
    assert np.isfinite(outputs(files / "tuned.onnx", True)).all()
    different = run("diff", "float.onnx", "tuned.onnx", code=1)
    assert f"x > {CONV}:0" in different
    assert f"w > {CONV}:1" in different
    run("import", "tuned.onnx", "-o", "again.json", "--reference", "float.onnx")
    run("apply", "float.onnx", "again.json", "-o", "again.onnx")
    run("diff", "tuned.onnx", "again.onnx")
    run("strip", "tuned.onnx", "--reference", "float.onnx", "-o", "back.onnx")
    for choice in (True, False):
        restored = outputs(files / "back.onnx", choice)
        np.testing.assert_array_equal(outputs(files / "float.onnx", choice), restored)
    run("lint", "tuned.onnx", "--target", "onnxruntime-cpu")
    assert CONV in run("explain", "tuned.onnx", "--data", "data.npz")
