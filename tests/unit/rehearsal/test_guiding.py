"""The tensors at which the error that guides a search is measured."""

from __future__ import annotations

import pytest
from onnx_text import parsed

from qdqspec.accuracy.rehearsal import guiding_outputs

ONE, INDEX = "float[1,8] y", "int64[1,1] y"
# What follows `a`, the product of input and weight; the outputs; the guides.
CASES = {
    "computed floats": ("y = Softmax(a)", ONE, ["y"]),
    "copied floats": ("b = Sigmoid(a)  y = Identity(b)", ONE, ["y"]),
    "an argmax": ("b = Softmax(a)  c = Transpose(b)  y = ArgMax<axis = 1>(c)", INDEX, ["b"]),
    "gathered elements": (
        "s = Sigmoid(a)  i = ArgMax<axis = 1>(s)  y = Gather<axis = 1>(a, i)",
        ONE,
        ["a", "s"],
    ),
    "several outputs": ("z = Relu(a)  y = ArgMax<axis = 1>(a)", f"float[1,8] z, {INDEX}", ["z", "a"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_output_is_guided_by_the_last_floats_before_a_selection(name: str) -> None:
    body, outputs, guides = CASES[name]
    ports = f"(float[1,8] x, float[8,8] w) => ({outputs})"
    found = guiding_outputs(parsed(f"g {ports} {{ a = MatMul(x, w)  {body} }}", 19))
    assert sorted(tensor for edges in found.values() for tensor, _ in edges) == sorted(guides)
    assert found.keys() == {port.split()[1] for port in outputs.split(", ")}
