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


@pytest.mark.parametrize("op", ["Softmax", "Sigmoid", "Identity", "LpNormalization"])
def test_an_output_of_computed_floats_is_its_own_guide(op: str) -> None:
    assert guide(f"a = MatMul(x, w)  y = {op}(a)") == ["y"]


def test_the_guide_of_a_selection_is_what_it_selects_by() -> None:
    body = "a = MatMul(x, w)  b = Softmax(a)  c = Transpose(b)  y = ArgMax<axis = 1>(c)"
    assert guide(body, "int64[1,1] y") == ["b"]


def test_the_guides_of_gathered_elements_are_the_elements_and_the_scores_of_their_indices() -> None:
    body = "a = MatMul(x, w)  s = Sigmoid(a)  i = ArgMax<axis = 1>(s)  y = Gather<axis = 1>(a, i)"
    assert sorted(guide(body)) == ["a", "s"]


def test_each_of_several_outputs_has_a_guide() -> None:
    body = "a = MatMul(x, w)  y = Relu(a)  z = ArgMax<axis = 1>(a)"
    assert guide(body, "float[1,8] y, int64[1,1] z") == ["y", "a"]
