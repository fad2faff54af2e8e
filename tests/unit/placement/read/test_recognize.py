"""Proofs that a tensor is not negative, and detection of a following Relu."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.graph.model import Model
from qdqspec.qdq.read.recognize import Signs

CONSTANTS = {
    "pos": np.ones((2, 2), np.float32),
    "neg": -np.ones((2, 2), np.float32),
    "zero": np.zeros((), np.float32),
    "low": np.full((), -1, np.float32),
    "six": np.full((), 6, np.float32),
    "shape": np.array([2, 2]),
    "axes": np.array([0]),
    "pads": np.zeros(4, np.int64),
    "s": np.full((), 0.5, np.float32),
    "u0": np.zeros((), np.uint8),
    "u3": np.full((), 3, np.uint8),
}


def signs(body: str) -> Signs:
    head = '<ir_version: 10, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] t)'
    proto = onnx.parser.parse_model(f"{head} {{ {body} }}")
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in CONSTANTS.items())
    return Signs(Model(proto))


@pytest.mark.parametrize(
    "body",
    [
        "t = Relu(x)",
        "t = Softmax(x)",
        "t = Clip(x, zero, six)",
        "t = Mul(x, x)",
        "a = Mul(x, x)  t = ReduceSum(a, axes)",
        "a = Relu(x)  b = Sigmoid(x)  t = Add(a, b)",
        "a = Relu(x)  t = MatMul(a, pos)",
        "a = Relu(x)  b = Reshape(a, shape)  t = Transpose(b)",
        "a = Relu(x)  t = Pad(a, pads)",
        "q = QuantizeLinear(x, s, u0)  t = DequantizeLinear(q, s, u0)",
    ],
)
def test_a_tensor_that_cannot_be_negative_is_recognized(body: str) -> None:
    assert signs(body).never_negative("t")


@pytest.mark.parametrize(
    "body",
    [
        "t = Identity(x)",
        "t = Clip(x, low, six)",
        "t = Clip(x)",
        "a = Relu(x)  t = Sub(a, pos)",
        "a = Relu(x)  t = MatMul(a, neg)",
        "a = Relu(x)  t = Add(a, x)",
        "a = Relu(x)  t = Gemm<alpha = -1.0>(a, pos)",
        "a = Relu(x)  t = Pad(a, pads, low)",
        "q = QuantizeLinear(x, s, u3)  t = DequantizeLinear(q, s, u3)",
    ],
)
def test_a_tensor_that_may_be_negative_is_not_recognized(body: str) -> None:
    assert not signs(body).never_negative("t")


def test_a_long_chain_of_additions_is_searched_once() -> None:
    steps = " ".join(f"a{i + 1} = Add(a{i}, a{i})" for i in range(60))
    assert signs(f"a0 = Relu(x) {steps} t = Identity(a60)").never_negative("t")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("t = Relu(m)", True),
        ("t = Clip(m, zero, six)", True),
        ("a = Reshape(m, shape)  t = Relu(a)", True),
        ("q = QuantizeLinear(m, s, u0)  a = DequantizeLinear(q, s, u0)  t = Relu(a)", True),
        ("a = Neg(m)  t = Relu(a)", False),
        ("t = Clip(m, low, six)", False),
        ("t = Add(m, m)", False),
    ],
)
def test_a_following_relu_is_found(body: str, expected: bool) -> None:
    assert signs(f"m = MatMul(x, x)  {body}").cut_at_zero("m") == expected
