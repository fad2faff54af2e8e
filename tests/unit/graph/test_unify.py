"""Types of the results of operators that shape inference does not cover."""

from __future__ import annotations

import random

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from onnx_text import parsed
from random_models import onnx_models

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.declared import with_types
from qdqspec.graph.model import Model
from qdqspec.graph.unify import assumed, unified
from qdqspec.qdq.space.search_space import SchemeSpace

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
