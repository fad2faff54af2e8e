"""Tensors that are never offered for quantization."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_text import parsed

from qdqspec.backends.base import Capabilities
from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.qdq.space.search_space import SchemeSpace


def model_of(text: str, **constants: object) -> Model:
    return parsed(text, named=True, w=(4, 4, 1, 1), **constants)


def space_of(model: Model) -> SchemeSpace:
    return SchemeSpace(model, backend().capabilities())


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
    text = "g (float[4,4] x) => (float[N,4] y) { a = MatMul(x, x)  b = Add(a, m)  y = MatMul(b, x) }"
    assert ("b" in space_of(model_of(text, m=constant)).by_id) is offered


def test_denied_nodes_read_floating_point_and_their_neighbours_stay_quantizable() -> None:
    model = parsed(
        """net (float[1,4] x) => (float[1,4] p, float[1,4] y) {
            a = Gemm(x, w)  p = Softmax(a)  b = Gemm(a, w)  c = Gemm(b, w)  d = Softmax(c)  y = Softmax(d) }""",
        named=True,
        w=(4, 4),
    )
    capabilities = Capabilities(
        formats=("int8",),
        labels={"Gemm": ("in+out", "in-only"), "Softmax": ("in+out",)},
        activations={"int8": "uint8"},
        weights={"int8": "int8"},
    )
    space = SchemeSpace(model, capabilities, allowed=set("abc"), denied=set("pdy"))
    placement = space.resolve(space.everything())
    assert not {end.node for site in placement.sites for end in site.consumers} & set("pdy")
    assert space.by_id["a"].labels == ("fp", "in+out", "in-only")  # b reads it too
    assert space.by_id["c"].labels == ("fp", "in-only")  # only a Softmax does
