"""Tensors that are never offered for quantization."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import QuantizeRules

HEAD = '<ir_version: 8, opset_import: ["": 17]>'


def model_of(text: str) -> Model:
    proto = onnx.parser.parse_model(HEAD + text)
    for node in proto.graph.node:
        node.name = node.output[0]
    weight = np.random.default_rng(0).normal(size=(4, 4, 1, 1)).astype(np.float32)
    if any("w" in node.input for node in proto.graph.node):
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return Model(proto)


def space_of(model: Model, rules: QuantizeRules | None = None) -> SchemeSpace:
    return SchemeSpace(model, backend().capabilities(), rules=rules)


def test_shape_inputs_and_indices_are_not_offered() -> None:
    text = """
    g (float[1,4,6,6] x, int64[2] at) => (float[2,4] y)
    <int64[2] to = {6, 24}>
    {
      c = Conv(x, w)
      f = Reshape(c, to)
      s = Slice(f, at, at)
      y = Gather(f, at)
    }
    """
    model = model_of(text)
    offered = set(space_of(model).tensors)
    offered |= {
        site.tensor for unit in space_of(model).units for form in unit.forms for site in form.constants
    }
    assert offered.isdisjoint({"to", "at"})
    assert {"x", "c", "f"} <= offered


# Each output has a size that is a sum of predicted lengths, as in models that make speech.
_LENGTH = (
    """a = Conv(x, w) b = ReduceSum<keepdims = 0>(a) c = Ceil(b) k = Cast<to = 7>(c) n = Reshape(k, one)"""
)
_SIZED = {
    "Expand": "y = Expand(v, n)",
    "Range": "y = Range(zero, k, step)",
    "Reshape": "y = Reshape(v, n)",
    "Resize": "y = Resize(v, , , n)",
}


@pytest.mark.parametrize("op_type", _SIZED)
def test_operators_whose_values_set_a_size_are_not_offered(op_type: str) -> None:
    text = f"""
    g (float[1,4,6,6] x, float[4] v) => (y, float[1,4,6,6] z)
    <int64[1] one = {{1}}, int64[1] none = {{0}}, int64 zero = {{0}}, int64 step = {{1}}>
    {{ {_LENGTH} {_SIZED[op_type]} d = Conv(a, w) z = Sigmoid(d) }}
    """
    offered = {unit.id for unit in space_of(model_of(text)).units}
    assert "d" in offered
    assert offered.isdisjoint({"a", "b"})


def test_a_shape_read_from_a_tensor_does_not_keep_its_makers_in_floating_point() -> None:
    text = """
    g (float[1,4,6,6] x) => (float[1,4,6,6] z)
    { a = Conv(x, w) s = Shape(a) b = Reshape(a, s) c = Conv(b, w) z = Sigmoid(c) }
    """
    assert "a" in {unit.id for unit in space_of(model_of(text)).units}


def test_a_size_that_a_body_computes_keeps_what_the_body_reads_in_floating_point() -> None:
    text = """
    g (float[1,4,6,6] x, bool c) => (y, float[1,4,6,6] z)
    <int64[1] one = {1}, int64 zero = {0}, int64 step = {1}>
    { a = Conv(x, w) h = Conv(a, w)
      k = If (c) <then_branch = t () => (int64 u) { f = ReduceMax<keepdims = 0>(h) u = Cast<to = 7>(f) },
                  else_branch = e () => (int64 v) { g = ReduceMin<keepdims = 0>(h) v = Cast<to = 7>(g) }>
      y = Range(zero, k, step) d = Conv(x, w) z = Sigmoid(d) }
    """
    offered = {unit.id for unit in space_of(model_of(text)).units}
    assert "d" in offered
    assert "a" not in offered


@pytest.mark.parametrize(
    ("constant", "offered"),
    [
        (np.full((4, 4), -3, np.float32), True),
        (np.full((4, 4), -np.inf, np.float32), False),
        (np.array(np.nan, np.float32), False),
        (np.zeros((0, 4), np.float32), False),
    ],
    ids=["numbers", "infinite", "NaN", "no element"],
)
def test_constants_that_have_no_scale_are_not_offered(constant: np.ndarray, offered: bool) -> None:
    """An attention mask contains minus infinity; NaN and empty tensors have no range."""
    model = model_of(
        "g (float[4,4] x) => (float[N,4] y) { a = MatMul(x, x)\n b = Add(a, m)\n y = MatMul(b, x) }"
    )
    model.proto.graph.initializer.append(numpy_helper.from_array(constant, "m"))
    assert ("b" in space_of(Model(model.proto)).by_id) is offered
