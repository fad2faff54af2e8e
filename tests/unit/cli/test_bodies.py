"""The commands on a model of opset 11 whose network is in a body of an If."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from random_models import ranges_for

from qdqspec.graph.model import load_model
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.scheme.scheme_file import write_scheme
from qdqspec.types import Consumer, Placement, Site

TEXT = """<ir_version: 6, opset_import: ["": 11]> g (float[1,8,8,8] x, bool c) => (float[1,8] y) {
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
def files(tmp_path: Path) -> Path:
    """The float model, a scheme with the two pairs of its convolution, and data that runs it."""
    proto = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    weight = random.normal(size=(8, 8, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "float.onnx")
    model = load_model(tmp_path / "float.onnx")
    sites = (
        Site(tensor="x", consumers=(Consumer(CONV, 0),), format="uint8"),
        Site(tensor="w", consumers=(Consumer(CONV, 1),), format="int8", weight=True),
    )
    placement = Placement(sites=frozenset(sites))
    numbers = Quantizer(model, ranges_for(model)).placed(placement)
    write_scheme(tmp_path / "scheme.json", placement, numbers, "onnxruntime-cpu")
    x = random.normal(size=(4, 1, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, c=np.ones(4, bool))
    return tmp_path


@pytest.fixture
def applied(files: Path, verb) -> Path:
    result = verb("apply", "float.onnx", "scheme.json", "-o", "tuned.onnx")
    assert result.code == 0, result.err
    return files


def outputs(path: Path, choice: bool) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).uniform(-0.5, 0.5, size=(1, 8, 8, 8)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x, "c": np.array(choice)})[0])


def test_apply_raises_the_opset_inside_bodies_too(applied: Path) -> None:
    made = load_model(applied / "tuned.onnx")
    assert made.opset == 13
    onnx.checker.check_model(made.proto, full_check=True)
    pairs = [n for n in made.nodes if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {n.scope for n in pairs} == {"choice/then_branch"}
    np.testing.assert_array_equal(
        outputs(applied / "float.onnx", False), outputs(applied / "tuned.onnx", False)
    )
    assert np.isfinite(outputs(applied / "tuned.onnx", True)).all()


def test_import_and_apply_give_the_same_model(applied: Path, verb) -> None:
    assert verb("import", "tuned.onnx", "-o", "again.json", "--reference", "float.onnx").code == 0
    assert verb("apply", "float.onnx", "again.json", "-o", "again.onnx").code == 0
    compared = verb("diff", "tuned.onnx", "again.onnx")
    assert compared.code == 0, compared.out
    different = verb("diff", "float.onnx", "tuned.onnx").out
    assert f"x > {CONV}:0" in different
    assert f"w > {CONV}:1" in different


def test_strip_restores_the_float_model(applied: Path, verb) -> None:
    assert verb("strip", "tuned.onnx", "--reference", "float.onnx", "-o", "back.onnx").code == 0
    for choice in (True, False):
        np.testing.assert_array_equal(
            outputs(applied / "float.onnx", choice), outputs(applied / "back.onnx", choice)
        )
    assert not any(n.op_type.endswith("QuantizeLinear") for n in load_model(applied / "back.onnx").nodes)


def test_lint_and_explain_read_bodies(applied: Path, verb) -> None:
    linted = verb("lint", "tuned.onnx", "--target", "onnxruntime-cpu")
    assert linted.code == 0, linted.out
    explained = verb("explain", "tuned.onnx", "--data", "data.npz")
    assert explained.code == 0, explained.err
    assert CONV in explained.out
