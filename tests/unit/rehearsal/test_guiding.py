"""The tensors at which the error that guides a search is measured."""

from __future__ import annotations

import onnx
import pytest

from qdqspec.accuracy.rehearsal import guiding_outputs
from qdqspec.graph.model import Model


def model_of(body: str, outputs: str = "float[1,8] y") -> Model:
    text = (
        f'<ir_version: 8, opset_import: ["": 19]> g (float[1,8] x, float[8,8] w) => ({outputs}) {{ {body} }}'
    )
    return Model(onnx.parser.parse_model(text))


def guide(body: str, outputs: str = "float[1,8] y") -> list[str]:
    """The guiding tensors of all outputs."""
    found = guiding_outputs(model_of(body, outputs))
    return [tensor for edges in found.values() for tensor, _ in edges]


@pytest.mark.parametrize("op", ["Softmax", "Sigmoid", "LpNormalization"])
def test_the_error_is_measured_before_a_trailing_operator_that_saturates(op: str) -> None:
    assert guide(f"a = MatMul(x, w)  y = {op}(a)") == ["a"]


def test_trailing_operators_that_copy_values_are_skipped() -> None:
    assert guide("a = MatMul(x, w)  b = Softmax(a)  c = Transpose(b)  y = Identity(c)") == ["a"]
    assert guide("a = MatMul(x, w)  c = Transpose(a)  b = Sigmoid(c)  y = Identity(b)") == ["a"]


def test_an_output_without_a_saturating_operator_is_its_own_guide() -> None:
    assert guide("a = MatMul(x, w)  y = Identity(a)") == ["y"]
    assert guide("b = Softmax(x)  y = MatMul(b, w)") == ["y"]
    assert guide("a = MatMul(x, w)  s = Sigmoid(a)  y = Mul(a, s)") == ["y"]


def test_the_guide_of_an_argmax_is_its_input_scores() -> None:
    body = "a = MatMul(x, w)  b = Softmax(a)  y = ArgMax<axis = 1>(b)"
    assert guide(body, "int64[1,1] y") == ["a"]


def test_the_guide_of_a_normalized_embedding_is_the_embedding_before_the_division() -> None:
    spelled = (
        "a = MatMul(x, w)  n = ReduceL2<keepdims = 1>(a)  least = Constant<value = float {1e-12}>()"
        "  m = Max(n, least)  y = Div(a, m)"
    )
    assert guide(spelled) == ["a"]
    assert guide("a = MatMul(x, w)  q = Mul(a, a)  s = ReduceSum(q)  n = Sqrt(s)  y = Div(a, n)") == ["a"]
    assert guide("a = MatMul(x, w)  n = ReduceL2<keepdims = 1>(x)  y = Div(a, n)") == ["y"]


def test_each_of_several_outputs_has_a_guide() -> None:
    body = "a = MatMul(x, w)  y = Softmax(a)  z = Relu(a)"
    assert guiding_outputs(model_of(body, "float[1,8] y, float[1,8] z")).keys() == {"y", "z"}
    assert guide(body, "float[1,8] y, float[1,8] z") == ["a", "z"]
