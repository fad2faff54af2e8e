"""Constant folding: which nodes it computes, which it removes, and which it never changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from qdqspec.graph.fold import FoldedConstants, fold_constants, fold_weights
from qdqspec.graph.model import Model, load_model


def net(text: str, **constants: object) -> Model:
    return parsed(text, 19, **constants)


def ops(folded: FoldedConstants) -> list[str]:
    return [node.op_type for node in folded.model.nodes if not node.is_marker]


S = np.array(0.5, np.float32)
Z = np.array(3, np.int8)
W = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    "text",
    [
        "q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = Add(x, d)",
        "d = DequantizeLinear(i, s, z)  r = Relu(d)  y = Add(x, r)",
        "q, t, u = DynamicQuantizeLinear(w)  d = DequantizeLinear(q, t, u)  y = Add(x, d)",
        "q = trt.TRT_FP8QuantizeLinear(w, s)  d = trt.TRT_FP8DequantizeLinear(q, s)  y = Add(x, d)",
        "d = com.microsoft.DequantizeLinear(i, s, z)  y = Add(x, d)",
        "d = DequantizeLinear(i, s, z)  y = Neg(x)",
    ],
    ids=["pair", "stored", "dynamic", "trt", "microsoft", "unread"],
)
def test_q_and_dq_are_never_folded(text: str) -> None:
    model = net(f"g (float[4] x) => (float[4] y) {{ {text} }}", w=W, s=S, z=Z, i=np.ones(4, np.int8))
    folded = fold_constants(model)
    assert [n.proto for n in folded.model.nodes] == [n.proto for n in model.nodes]


@pytest.mark.parametrize(
    "op", ["RandomNormal<shape = [4]>()", "RandomNormalLike(w)", "Bernoulli(w)", "Dropout(w)"]
)
def test_random_operators_are_not_folded(op: str) -> None:
    folded = fold_constants(net(f"g (float[4] x) => (float[4] y) {{ r = {op}  y = Add(x, r) }}", w=W))
    assert ops(folded) == [op.partition("(")[0].partition("<")[0], "Add"]


def test_an_initializer_that_a_caller_may_replace_is_not_constant() -> None:
    text = "g (float[4] x, float s) => (float[4] y) { a = Add(s, s)  y = Add(x, a) }"
    model = net(text, s=S)
    assert fold_constants(model).model is model
    weight = net(
        "g (float[2,4] x, float[4,4] w) => (float[2,4] y) { t = Transpose(w)  y = MatMul(x, t) }", w=(4, 4)
    )
    assert fold_weights(weight).model is weight
    old = fold_constants(parsed(text, 19, ir=3, s=S))
    assert ops(old) == ["Add"]
    assert [i.name for i in old.model.proto.graph.input] == ["x", "a"]
    onnx.checker.check_model(old.model.proto)


def test_constants_of_bodies_are_folded_in_them() -> None:
    folded = fold_constants(
        net(
            """g (float[4] x, bool c) => (float[4] y) {
                a = Add(s, s)
                y = If (c) <then_branch = t () => (float[4] u) { u = Mul(x, a) },
                            else_branch = e () => (float[4] v) { k = Add(s, s)  v = Mul(x, k) }> }""",
            s=S,
        )
    )
    assert ops(folded) == ["Mul", "Mul", "If"]
    assert set(folded.model.initializers) == {"a", "k"}
    assert [t.name for t in folded.model.proto.graph.initializer] == []  # each is in the body that reads it
    onnx.checker.check_model(folded.model.proto, full_check=True)


def test_functions_of_the_model_are_not_treated_as_operators() -> None:
    model = net("g (float[4] x) => (float[4] y) { a = Neg(w)  y = Add(x, a) }", w=W)
    function = helper.make_function(
        "", "Neg", ["i"], ["o"], [helper.make_node("Abs", ["i"], ["o"])], [helper.make_opsetid("", 19)]
    )
    model.proto.functions.append(function)
    assert fold_constants(model).model is model


def test_tensors_above_the_size_limit_are_not_computed() -> None:
    model = net(
        "g (float[4] x) => (float[4] y) { e = ConstantOfShape(n)  r = ReduceSum(e)  y = Add(x, r) }",
        n=np.array([10**12], np.int64),
    )
    folded = fold_constants(model)
    assert folded.model is model
    assert "would be larger than 1048576 bytes: 'ConstantOfShape#0'" in folded.notes[0]
    small = net(
        "g (float[99] x) => (float[99] y) { e = ConstantOfShape(n)  y = Add(x, e) }", n=np.array([99])
    )
    assert ops(fold_constants(small)) == ["Add"]
    assert ops(fold_constants(small, limit_bytes=100)) == ["ConstantOfShape", "Add"]


def test_a_large_weight_may_be_transposed_but_not_enlarged() -> None:
    weight = np.ones((600, 512), np.float32)  # the weight alone is above the limit
    turned = net("g (float[1,512] x) => (float[1,600] y) { t = Transpose(w)  y = MatMul(x, t) }", w=weight)
    assert ops(fold_constants(turned)) == ["MatMul"]
    text = "g (float[1] x) => (float[1200,512] y) { t = Tile(w, n)  y = Mul(x, t) }"
    tiled = net(text, w=weight, n=np.array([2, 1]))
    assert fold_constants(tiled).model is tiled


def test_unused_nodes_and_initializers_are_removed() -> None:
    folded = fold_constants(
        net(
            "g (float[4] x) => (float[4] y) { a = Neg(x)  b = Abs(a)  c = trt.Own(x)  y = Relu(x) }", s=S, w=W
        )
    )
    assert ops(folded) == ["Own", "Relu"]
    assert folded.unused == ("Neg#0", "Abs#1")
    assert folded.model.initializers == {}


def test_operators_that_the_reference_cannot_compute_are_not_folded() -> None:
    broken = net("g (float[4] x) => (float[4] y) { r = Reshape(w, n)  y = Add(x, r) }", w=W, n=np.array([3]))
    assert fold_constants(broken).model is broken


def test_constant_folding_reduces_a_real_model(models: Path) -> None:
    folded = fold_constants(load_model(models / "ultraface_rfb320.onnx"))
    assert len(folded.model.nodes) < 150
    assert {"Shape", "Gather", "Unsqueeze"}.isdisjoint(ops(folded))


_FEED = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
_SQUARE = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("t = Transpose(w)  y = MatMul(x, t)", ["MatMul"]),
        ("t = Transpose(w)  a = Gather(w, at)  r = Add(x, a)  y = MatMul(r, t)", ["Gather", "Add", "MatMul"]),
        ("t = Transpose(w)  y = Gemm(x, t, s)", ["Gemm"]),
        ("i = Identity(w)  j = Identity(i)  y = Gemm(x, j)", ["Gemm"]),
        ("h = Cast<to = 10>(w)  f = Cast<to = 1>(h)  y = MatMul(x, f)", ["MatMul"]),
        ("n = ReduceL2<keepdims = 1>(w)  d = Div(w, n)  m = Mul(d, s)  y = MatMul(x, m)", ["MatMul"]),
        ("n = Neg(b)  y = Gemm(x, w, n)", ["Gemm"]),
        ("t = Transpose(w)  a = MatMul(t, x2)  y = MatMul(x, a)", ["MatMul", "MatMul"]),
        # what is no weight stays, and so do weights that depend on an input or that are quantized
        ("n = Neg(b)  a = Add(x, n)  y = MatMul(a, w)", ["Neg", "Add", "MatMul"]),
        ("m = Mul(w, x3)  y = MatMul(x, m)", ["Mul", "MatMul"]),
        (
            "q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = MatMul(x, d)",
            ["QuantizeLinear", "DequantizeLinear", "MatMul"],
        ),
    ],
)
def test_weights_and_biases_computed_from_constants_become_constants(body: str, left: list[str]) -> None:
    text = f"g (float[2,4] x, float[4,4] x2, float[1,4] x3) => (float[2,4] y) {{ {body} }}"
    model = net(text, w=_SQUARE, b=W, s=S, z=Z, at=np.array([1, 2]))
    folded = fold_weights(model)
    assert [node.op_type for node in folded.model.nodes] == left
    feeds = {"x": _FEED, "x2": _SQUARE + 1, "x3": _FEED[:1]}
    before, after = (ReferenceEvaluator(each.proto).run(None, feeds)[0] for each in (model, folded.model))
    np.testing.assert_allclose(after, before, rtol=1e-6)
