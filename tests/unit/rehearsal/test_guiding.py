"""The tensors at which the error that guides a search is measured."""

from __future__ import annotations

import onnx
import pytest

from qdqspec.accuracy.rehearsal import guiding_outputs
from qdqspec.graph.model import Model

ONE, TWO, INDEX = "float[1,8] y", "float[1,8] y, float[1,8] z", "int64[1,1] y"
SPELLED = """n = ReduceL2<keepdims = 1>(a)  least = Constant<value = float {1e-12}>()
  m = Max(n, least)  y = Div(a, m)"""
# What follows `a`, the product of input and weight; the outputs; the guides.
CASES = {
    "before a softmax": ("y = Softmax(a)", ONE, ["a"]),
    "before a sigmoid": ("y = Sigmoid(a)", ONE, ["a"]),
    "before a normalization": ("y = LpNormalization(a)", ONE, ["a"]),
    "copies after it": ("b = Softmax(a)  c = Transpose(b)  y = Identity(c)", ONE, ["a"]),
    "copies on both sides": ("c = Transpose(a)  b = Sigmoid(c)  y = Identity(b)", ONE, ["a"]),
    "nothing saturates": ("y = Identity(a)", ONE, ["y"]),
    "saturation inside": ("b = Softmax(x)  y = MatMul(b, w)", ONE, ["y"]),
    "a gate": ("s = Sigmoid(a)  y = Mul(a, s)", ONE, ["y"]),
    "before an argmax": ("b = Softmax(a)  y = ArgMax<axis = 1>(b)", INDEX, ["a"]),
    "before a division by its norm": (SPELLED, ONE, ["a"]),
    "before a division by a computed norm": (
        "q = Mul(a, a)  s = ReduceSum(q)  n = Sqrt(s)  y = Div(a, n)",
        ONE,
        ["a"],
    ),
    "a division by another norm": ("n = ReduceL2<keepdims = 1>(x)  y = Div(a, n)", ONE, ["y"]),
    "several outputs": ("y = Softmax(a)  z = Relu(a)", TWO, ["a", "z"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_output_is_guided_by_the_last_tensor_that_shows_all_errors(name: str) -> None:
    body, outputs, guides = CASES[name]
    ports = f"(float[1,8] x, float[8,8] w) => ({outputs})"
    text = f'<ir_version: 8, opset_import: ["": 19]> g {ports} {{ a = MatMul(x, w)  {body} }}'
    found = guiding_outputs(Model(onnx.parser.parse_model(text)))
    assert [tensor for edges in found.values() for tensor, _ in edges] == guides
    assert found.keys() == {port.split()[1] for port in outputs.split(", ")}
