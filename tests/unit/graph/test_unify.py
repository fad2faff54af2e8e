"""Types: the float32 form of a float16 model, and types that shape inference does not find."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import TensorProto
from onnx_text import outputs_of, parsed
from random_models import onnx_models, random_inputs

from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import ModelError
from qdqspec.graph.declared import with_types
from qdqspec.graph.float32 import computes_in_float16, in_float32, is_converted
from qdqspec.graph.model import Model
from qdqspec.graph.unify import assumed, unified
from qdqspec.qdq.search_space import SchemeSpace
from tests.support.half_models import in_float16

PORTS = "(float16[2, 4] x) => (float16[2, 4] y)"


def half_model(body: str, ports: str = PORTS) -> Model:
    """A model of these nodes; ``w`` is a float16 weight."""
    weight = np.linspace(-1, 1, 16, dtype=np.float16).reshape(4, 4)
    model = parsed(f"g {ports} {{ {body} }}", 19, ir=9, w=weight)
    onnx.checker.check_model(model.proto, full_check=True)
    return model


def assert_alike(half: Model) -> Model:
    """The float32 form of a model, which computes the same within the precision of float16."""
    converted = in_float32(half)
    onnx.checker.check_model(converted.proto, full_check=True)
    assert list(converted.proto.graph.input) == list(half.proto.graph.input)
    assert list(converted.proto.graph.output) == list(half.proto.graph.output)
    assert is_converted(converted)
    assert not computes_in_float16(converted)
    feeds = {name: value.astype(np.float16) for name, value in random_inputs(half).items()}
    for one, other in zip(outputs_of(half, feeds), outputs_of(converted, feeds), strict=True):
        assert one.dtype == other.dtype
        scale = np.abs(one.astype(np.float64)).max(initial=1.0)
        np.testing.assert_allclose(other.astype(np.float64), one.astype(np.float64), atol=0.01 * scale)
    return converted


def casts_to_integers(model: Model) -> bool:
    """Whether values are cut off to integers: the least difference before it is one behind it."""
    kinds = (model.elem_type(node.outputs[0]) for node in model.nodes if node.op_type == "Cast")
    return any(kind not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE) for kind in kinds)


@given(onnx_models())
def test_the_float32_form_of_any_model_computes_the_same(proto: onnx.ModelProto) -> None:
    half = Model(in_float16(proto))
    assume(not casts_to_integers(half))
    onnx.checker.check_model(half.proto, full_check=True)
    converted = assert_alike(half)
    assert [node.name for node in half.nodes if not node.is_marker] == [
        node.name
        for node in converted.nodes
        if not node.is_marker and not node.name.endswith("/float32/Cast")
    ]


# the parser takes float16 numbers as their bits: 48128 is -1, 16640 is 2.5, 11878 is 0.1
CASES = {
    "weights behind casts": (
        "v = Cast<to = 1>(w)  c = Cast<to = 1>(x)  m = MatMul(c, v)  h = Cast<to = 10>(m)  y = Relu(h)"
    ),
    "a float32 parameter": (
        """a = Constant<value_ints = [0]>()  s = Constant<value = float[3] {1.0, 1.0, 1.0}>()  u = Unsqueeze(x, a)
           r = Resize(u, , s)  p = Squeeze(r, a)  y = MatMul(p, w)"""
    ),
    "bounds": "low = Constant<value = float16 {48128}>()  y = Clip(x, low)",
    "a normalization": (
        "g = Constant<value = float16[4] {16640, 16640, 48128, 11878}>()  y = LayerNormalization(x, g)"
    ),
    "a fill value": "s = Shape(x)  f = ConstantOfShape<value = float16[1] {16640}>(s)  y = Mul(x, f)",
    "a float32 part": "c = Cast<to = 1>(x)  e = Exp(c)  h = Cast<to = 10>(e)  y = MatMul(h, w)",
    "the type of another tensor": (
        "i = Shape(x)  f = CastLike(i, x)  z = ReduceSum<keepdims = 0>(f)  y = Add(x, z)"
    ),
    "an input that is an output": "y = Relu(x)",
    "a weight that is an output": "y = MatMul(x, w)",
    "pairs": (
        """z = Constant<value = uint8 {128}>()  s = Constant<value = float16 {11878}>()  q = QuantizeLinear(x, s, z)
           d = DequantizeLinear(q, s, z)  y = MatMul(d, w)"""
    ),
}
MORE = {"an input that is an output": "float16[2, 4] x", "a weight that is an output": "float16[4, 4] w"}


@pytest.mark.parametrize("name", CASES)
def test_operators_with_types_of_their_own_are_converted(name: str) -> None:
    model = half_model(CASES[name], f"{PORTS[:-1]}, {MORE[name]})" if name in MORE else PORTS)
    assert computes_in_float16(model)
    assert_alike(model)


def test_a_default_value_of_an_input_keeps_its_type() -> None:
    model = half_model("y = MatMul(x, w)", "(float16[2, 4] x, float16[4, 4] w) => (float16[2, 4] y)")
    converted = in_float32(model)
    onnx.checker.check_model(converted.proto, full_check=True)
    assert {tensor.data_type for tensor in converted.proto.graph.initializer} == {TensorProto.FLOAT16}
    (expected,), (found,) = (
        outputs_of(each, {"x": np.ones((2, 4), np.float16)}) for each in (model, converted)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_bfloat16_stays() -> None:
    model = half_model("b = Cast<to = 16>(x)  c = Relu(b)  h = Cast<to = 10>(c)  y = MatMul(h, w)")
    converted = in_float32(model)
    onnx.checker.check_model(converted.proto, full_check=True)
    assert TensorProto.BFLOAT16 in {converted.elem_type(node.outputs[0]) for node in converted.nodes}


def test_an_unknown_operator_is_refused_with_its_name() -> None:
    with pytest.raises(ModelError, match=r"node 'turn' of operator mine:Rotate computes in float16"):
        in_float32(parsed(f"g {PORTS} {{ [turn] a = mine.Rotate(x)  y = Relu(a) }}", 19))


def test_an_input_that_is_no_tensor_is_refused() -> None:
    text = "g (seq(float16[2]) x) => (float16[n] y) { y = ConcatFromSequence<axis = 0>(x) }"
    with pytest.raises(ModelError, match="'x' is no tensor"):
        in_float32(parsed(text))


def test_float16_that_is_only_stored_is_no_computation() -> None:
    stored = half_model(
        "v = Cast<to = 1>(w)  m = MatMul(x, v)  y = Relu(m)", "(float[2, 4] x) => (float[2, 4] y)"
    )
    assert not computes_in_float16(stored)


F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(body: str, **constants: object) -> Model:
    return parsed(f"g (float[1, 4, 8, 8] x) => (float y) {{ {body} }}", **constants)


def test_types_of_data_and_result_follow_from_the_weight():
    found = model(
        """[a] b = mine.Unknown(x)  [c] d = Conv(b, w)  [e] f = Relu(d)  [g] s = Shape(f)
           [h] t = mine.Other(f)  [i] u = Cast<to = 7>(t)  [j] y = Identity(f)""",
        w=(4, 4, 1, 1),
    )
    (unit,) = SchemeSpace(found, backend().capabilities()).units
    assert unit.id == "c"
    assert [found.elem_type(name) for name in "bdf"] == [F, F, F]
    assert found.elem_type("s") == I64, "shape inference gives that type"
    assert found.elem_type("t") is None, "a Cast has any input type"
    assert found.elem_type("u") == I64
    assert found.shape("d") is None


def test_types_follow_from_the_weights_of_operators_that_onnx_runtime_adds():
    found = model(
        """[a] r = mine.Unknown(x)  [c] d = com.microsoft.Attention<num_heads = 2>(r, w, b, m)
           [e] f = com.microsoft.SkipLayerNormalization(d, r, g, h)  [i] y = mine.Other(f)""",
        w=(4, 12),
        b=(12,),
    )
    assert [found.elem_type(name) for name in "rdfgh"] == [F] * 5
    assert [found.elem_type(name) for name in "my"] == [None, F], "the mask has another type"


@given(onnx_models(), st.integers())
def test_no_wrong_type_is_inferred(proto: onnx.ModelProto, seed: int):
    found = Model(proto)
    check(found, {t: k.elem_type for t, k in found.types.items()}, random.Random(seed))


def check(found: Model, known: dict[str, int], lots: random.Random) -> None:
    shown = {name: kind for name, kind in known.items() if lots.random() < 0.5}
    told = unified([node.proto for node in found.nodes], found.opset, shown)
    assert not told.keys() & shown.keys()
    assert all(known.get(name, kind) == kind for name, kind in told.items())


def test_a_type_is_assumed_where_every_operator_allows_it() -> None:
    found = model(
        """[a] b = mine.Unknown(x)  [c] d = Relu(b)  [e] s = mine.Shape(d)  [f] t = Identity(s)
           [g] r = Reshape(d, t)  [h] y = mine.Last(r)"""
    )
    nodes = [node.proto for node in found.nodes]
    known = {name: kind.elem_type for name, kind in found.types.items() if kind.elem_type}
    taken = assumed(nodes, found.opset, known, TensorProto.FLOAT16)
    assert set(taken) == {"b", "d", "r"}, "s and t are a shape, which is int64"


def test_bfloat16_is_assumed_if_the_opset_has_it() -> None:
    nodes = [onnx.helper.make_node("Conv", ["a", "w"], ["b"])]
    assert set(assumed(nodes, 21, {}, TensorProto.FLOAT16)) == {"a", "w", "b"}
    assert assumed(nodes, 21, {}, TensorProto.BFLOAT16) == ()
    assert set(assumed(nodes, 22, {}, TensorProto.BFLOAT16)) == {"a", "w", "b"}


def test_an_assumed_type_is_declared() -> None:
    found = model("[a] b = mine.Unknown(x)  [c] d = Relu(b)  [e] y = mine.Last(d)")
    typed = with_types(found, "float16")
    assert [typed.elem_type(name) for name in "xbd"] == [F, TensorProto.FLOAT16, TensorProto.FLOAT16]
    assert found.elem_type("d") is None, "the model given is unchanged"
    assert with_types(typed, "float32") is typed, "all types are known"
