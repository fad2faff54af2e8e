"""The pairs that optimizers keep, on real models and with real optimizers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx_text import saved

from qdqspec.graph.model import load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq import survival
from qdqspec.qdq.strip import strip_qdq
from qdqspec.qdq.survival import check_survival

DATA = Path(__file__).parents[3] / "data"
OURS = ("constant-folding", "onnxruntime-basic", "onnxruntime-extended", "onnxruntime-all")


# Another scale after two Transposes that cancel out: ONNX Runtime keeps one of the two pairs.
CANCELLED = """g (float[2,3] x) => (float[2,3] y) {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  t = Transpose<perm = [1, 0]>(d)
    p = QuantizeLinear(t, r, z)  e = DequantizeLinear(p, r, z)  [last] y = Transpose<perm = [1, 0]>(e) }"""
NUMBERS = {"s": np.float32(0.01), "r": np.float32(0.02), "z": np.int8(0)}


@pytest.mark.parametrize("path", sorted(DATA.glob("*.onnx")), ids=lambda path: path.stem)
def test_our_optimizers_and_onnxruntime_keep_all_pairs_of_real_models(path: Path) -> None:
    for found in check_survival(path, OURS):
        assert (found.lost, found.error) == ((), ""), found.optimizer
        assert found.pairs == sum(n.op_type == "DequantizeLinear" for n in load_model(path).nodes)
        assert found.integer == 0 or found.optimizer in OURS[2:]


@pytest.mark.parametrize(
    ("name", "kept"), [("qdq_nncf_digits_resnet", 2), ("qdq_ort_u8s8_digits_resnet_b1", 1)]
)
@pytest.mark.parametrize("optimizer", OURS[2:])
def test_pairs_in_integer_kernels_are_counted_apart_from_kept_pairs(name: str, kept: int, optimizer) -> None:
    (found,) = check_survival(DATA / f"{name}.onnx", [optimizer])
    assert found.kept == kept
    assert found.integer > 30


def test_a_pair_that_onnxruntime_merges_is_reported_as_lost(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", CANCELLED, **NUMBERS)
    ours, theirs = check_survival(path, ["constant-folding", "onnxruntime-basic"])
    assert (ours.kept, ours.lost) == (2, ())
    assert theirs.lost == ("t > last:0",)
    assert theirs.kept == 1


# The pair after the first Conv is read by another Conv, and by a Shape that is removed by constant folding.
SHAPED = """g (float[1,2,4,4] x) => (float[1,2,16] y) {
    q = QuantizeLinear(x, s, u)  d = DequantizeLinear(q, s, u)  w = DequantizeLinear(i, s, z)
    c = Conv(d, w)  p = QuantizeLinear(c, t, u)  e = DequantizeLinear(p, t, u)
    m = Conv(e, w)  k = QuantizeLinear(m, r, u)  o = DequantizeLinear(k, r, u)
    n = Shape<end = 2>(e)  a = Concat<axis = 0>(n, rest)  y = Reshape(o, a) }"""


def test_a_pair_is_not_lost_for_a_node_that_reads_only_the_shape(tmp_path: Path) -> None:
    integers = {"i": np.ones((2, 2, 1, 1), np.int8), "rest": np.array([-1])}
    numbers = {name: np.float32(value) for name, value in {"s": 0.1, "t": 0.2, "r": 0.3}.items()}
    numbers |= {"u": np.uint8(0), "z": np.int8(0)}
    for found in check_survival(saved(tmp_path / "model.onnx", SHAPED, **integers, **numbers), OURS):
        assert (found.lost, found.pairs) == ((), 4), found.optimizer


def test_a_pair_is_not_lost_for_a_body_that_reads_only_the_shape(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,4] y) {
      c = Constant <value: tensor = bool {0}> ()
      [if] t = If (c) <else_branch: graph = e () => (float[1,4] b2) { b2 = Neg (x) },
                       then_branch: graph = th () => (float[1,4] b1) <float s = {0.03}, uint8 z = {109}> {
        q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  b1 = Add (x, d) }>
      shape = Shape (t)  u = Relu (x)  y = Reshape (u, shape) }"""
    path = saved(tmp_path / "model.onnx", text, opset=13, ir_version=8)
    (found,) = check_survival(path, ["constant-folding"])
    assert (found.kept, found.lost) == (1, ())


@pytest.mark.parametrize(
    "halves",
    [
        "h, g = Split<axis = 1>(d, parts)",
        "h = Slice(d, zero, two, one)  g = Slice(d, two, four, one)",  # ONNX Runtime makes a Split of both
    ],
)
def test_integers_of_the_second_output_of_a_split_are_kept(tmp_path: Path, halves: str) -> None:
    """YOLO and PicoDet split feature maps and reshape the parts."""
    text = f"""g (float[1,4,2] x) => (float[2] y, float[1,2,2] v) {{
        q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  {halves}
        p = QuantizeLinear(g, s, z)  e = DequantizeLinear(p, s, z)  k = QuantizeLinear(h, s, z)
        o = DequantizeLinear(k, s, z)  v = Neg(o)  [last] r = Reshape(e, flat)  i = QuantizeLinear(r, s, z)
        j = DequantizeLinear(i, s, z)  y = ReduceSum<keepdims = 0>(j, one) }}"""
    values = {"s": np.float32(0.1), "z": np.uint8(128), "parts": np.array([2, 2]), "flat": np.array([2, 2])}
    values |= {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "four": np.array([4])}
    for found in check_survival(saved(tmp_path / "model.onnx", text, **values), OURS):
        assert (found.lost, found.pairs) == ((), 4), found.optimizer


def test_a_pair_is_kept_by_an_arg_max_of_integers(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (int64[1] y) {
        q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = ArgMax<axis = 1, keepdims = 0>(d) }"""
    path = saved(tmp_path / "model.onnx", text, s=np.float32(0.1), z=np.uint8(128))
    for found in check_survival(path, OURS):
        assert (found.lost, found.pairs) == ((), 1), found.optimizer


def test_all_pairs_that_an_optimizer_removes_are_reported_as_lost(tmp_path: Path, monkeypatch) -> None:
    def strips(model: Path, folder: Path) -> Path:
        save_model(strip_qdq(load_model(model)).proto, folder / "out.onnx")
        return folder / "out.onnx"

    monkeypatch.setitem(survival._RUNS, "onnxslim", strips)
    (found,) = check_survival(DATA / "qdq_ort_s8s8_digits_resnet_b1.onnx", ["onnxslim"])
    assert (found.kept, found.integer, len(found.lost)) == (0, 0, 70)
    assert "input > /conv1/Conv:0" in found.lost
    assert "logits > graph output 'logits'" in found.lost


@pytest.mark.parametrize("tool", ["onnxslim", "onnxscript"])
def test_a_missing_optimizer_is_an_error_with_the_install_command(tool, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, tool, None)
    monkeypatch.setitem(sys.modules, "onnxscript.optimizer", None)
    (found,) = check_survival(DATA / "qdq_conv_polygraphy.onnx", [tool])
    assert tool in found.error
    assert found.cure == f"pip install {tool}"
    assert found.pairs == 0


def test_a_model_that_onnxruntime_refuses_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", "g (float[2] x) => (float[2] y) { y = own.Op(x) }")
    found, other = check_survival(path, ["onnxruntime-basic", "constant-folding"])
    assert found.error.startswith("ONNX Runtime could not optimize the model")
    assert not other.error
