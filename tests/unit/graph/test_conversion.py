"""Conversions of a whole model: a raised opset, float32 in place of float16, and types that inference does not find."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx.defs
import pytest
from hypothesis import assume, given, strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of, parsed
from random_models import onnx_models, random_inputs

from qdqspec.errors import ModelError
from qdqspec.graph import ops
from qdqspec.graph.conversion import in_float32, raise_opset, with_types
from qdqspec.graph.model import Model
from qdqspec.graph.protos import opset_of
from qdqspec.graph.unify import unified
from tests.support.changed_models import in_float16


def test_weights_that_no_caller_could_replace_remain_constant_and_other_domains_are_kept() -> None:
    """From IR version 4 on an initializer that is an input is a default value, which runtimes do not fold."""
    text = "g (float[4] x, float[4] w) => (float[4] y) { h = my.Odd(x)  y = Add(h, w) }"
    proto = parsed(text, 7, ir=3, w=(4,)).proto
    for opset in (7, 13):
        raised = raise_opset(proto, opset)
        assert [port.name for port in raised.graph.input] == ["x"]
        assert {o.domain: o.version for o in raised.opset_import} == {"": opset, "my": 1}
    assert len(proto.graph.input) == 2


def test_a_failure_states_both_versions_and_the_reason() -> None:
    proto = parsed("g (float[1] x) => (float[1] y) { y = NoSuchOperator(x) }", 7).proto
    with pytest.raises(ModelError, match=r"from 7 to 13: (.*NoSuchOperator|onnx converts no)"):
        raise_opset(proto, 13)


CHOICE = """g (float[1,4,8,8] x, bool c) => (float[1,4] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[1,4] p) {
            [conv] q = Conv(x, w) r = Relu(q) s = ReduceSum<axes = [2,3]>(r) p = Squeeze<axes = [2,3]>(s)
        },
        else_branch = e () => (float[1,4] p) {
            s = ReduceSum<axes = [2,3], keepdims = 0>(x) p = Softmax<axis = 1>(s)
        }
    >
}"""


def test_bodies_with_a_raised_opset_are_otherwise_equal() -> None:
    proto = parsed(CHOICE, 11).proto
    (branch, _) = (a.g for a in proto.graph.node[0].attribute)
    random = np.random.default_rng(0)
    branch.initializer.append(
        numpy_helper.from_array(random.normal(size=(4, 4, 1, 1)).astype(np.float32), "w")
    )
    branch.value_info.add().CopyFrom(onnx.helper.make_tensor_value_info("q", 1, [1, 4, 8, 8]))
    branch.initializer[0].doc_string = "trained"
    branch.node[0].metadata_props.add(key="scope", value="block")
    proto.metadata_props.add(key="author", value="me")
    before = proto.SerializeToString()
    raised = raise_opset(proto, 13)
    assert (opset_of(raised), proto.SerializeToString()) == (13, before)
    assert raised.metadata_props == proto.metadata_props
    onnx.checker.check_model(raised, full_check=True)
    (after, _) = (a.g for a in raised.graph.node[0].attribute)
    assert [len(n.input) for n in after.node if n.op_type in ("ReduceSum", "Squeeze")] == [2, 2]
    assert after.initializer[0] == branch.initializer[0]
    assert after.value_info == branch.value_info
    assert after.node[0] == branch.node[0]
    feeds = {"x": random.normal(size=(1, 4, 8, 8)).astype(np.float32)}
    for choice in (True, False):
        one, other = (outputs_of(m, {**feeds, "c": choice}) for m in (proto, raised))
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)


def test_results_of_replaced_operators_keep_their_names() -> None:
    text = """g (float[1,4,4,4] x) => (float[1,4,8,8] y) {
        a = Relu(x)  u = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]>(a)  y = Conv(u, w) }"""
    proto = parsed(text, 8, w=(4, 4, 1, 1)).proto
    raised = raise_opset(proto, 13)
    onnx.checker.check_model(raised, full_check=True)
    (resize,) = (node for node in raised.graph.node if node.op_type == "Resize")
    assert (resize.input[0], *resize.output) == ("a", "u")
    assert raised.graph.node[-1] == proto.graph.node[-1]
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype(np.float32)}
    np.testing.assert_array_equal(outputs_of(proto, feeds)[0], outputs_of(raised, feeds)[0])


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
    assert converted.converted_from
    assert not converted.float16_nodes
    feeds = {name: value.astype(np.float16) for name, value in random_inputs(half).items()}
    for one, other in zip(outputs_of(half, feeds), outputs_of(converted, feeds), strict=True):
        assert one.dtype == other.dtype
        scale = np.abs(one.astype(np.float64)).max(initial=1.0)
        np.testing.assert_allclose(other.astype(np.float64), one.astype(np.float64), atol=0.01 * scale)
    return converted


@given(onnx_models())
def test_the_float32_form_of_any_model_computes_the_same(proto: onnx.ModelProto) -> None:
    half = Model(in_float16(proto))
    kinds = {half.elem_type(node.outputs[0]) for node in half.nodes if node.op_type == "Cast"}
    # a Cast to integers would make one of the least difference
    assume(kinds <= {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
    onnx.checker.check_model(half.proto, full_check=True)
    converted = assert_alike(half)
    names = [[node.name for node in m.nodes if not node.is_marker] for m in (half, converted)]
    assert names[0] == [name for name in names[1] if not name.endswith("/float32/Cast")]


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
    "pairs": (
        """z = Constant<value = uint8 {128}>()  s = Constant<value = float16 {11878}>()  q = QuantizeLinear(x, s, z)
           d = DequantizeLinear(q, s, z)  y = MatMul(d, w)"""
    ),
}


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "more", ["", ", float16[2, 4] x, float16[4, 4] w"], ids=["", "inputs that are outputs"]
)
def test_operators_with_types_of_their_own_are_converted(body: str, more: str) -> None:
    model = half_model(body, f"{PORTS[:-1]}{more})")
    assert model.float16_nodes
    assert_alike(model)


def test_stored_float16_default_values_of_inputs_and_bfloat16_are_not_converted() -> None:
    body = "v = Cast<to = 1>(w)  m = MatMul(x, v)  y = Relu(m)"
    assert not half_model(body, "(float[2, 4] x) => (float[2, 4] y)").float16_nodes
    model = half_model("y = MatMul(x, w)", "(float16[2, 4] x, float16[4, 4] w) => (float16[2, 4] y)")
    converted = in_float32(model)
    assert {tensor.data_type for tensor in converted.proto.graph.initializer} == {TensorProto.FLOAT16}
    outputs = [outputs_of(each, {"x": np.ones((2, 4), np.float16)})[0] for each in (model, converted)]
    np.testing.assert_allclose(*outputs, rtol=1e-2)
    model = half_model("b = Cast<to = 16>(x)  c = Relu(b)  h = Cast<to = 10>(c)  y = MatMul(h, w)")
    converted = in_float32(model)
    onnx.checker.check_model(converted.proto, full_check=True)
    assert TensorProto.BFLOAT16 in {converted.elem_type(node.outputs[0]) for node in converted.nodes}


def test_an_input_that_is_no_tensor_is_refused() -> None:
    text = "g (seq(float16[2]) x) => (float16[n] y) { y = ConcatFromSequence<axis = 0>(x) }"
    with pytest.raises(ModelError, match="'x' is no tensor"):
        in_float32(parsed(text, 19))


F, I64 = TensorProto.FLOAT, TensorProto.INT64


def model(body: str, **constants: object) -> Model:
    return parsed(f"g (float[1, 4, 8, 8] x) => (float y) {{ {body} }}", **constants)


def test_types_of_data_and_result_follow_from_the_weight():
    found = model(
        """[a] b = mine.Unknown(x)  [c] d = Conv(b, w)  [e] f = Relu(d)  [g] s = Shape(f)
           [h] t = mine.Other(f)  [i] u = Cast<to = 7>(t)  [j] y = Identity(f)""",
        w=(4, 4, 1, 1),
    )
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


@given(onnx_models(), st.randoms(use_true_random=False))
def test_no_wrong_type_is_inferred(proto: onnx.ModelProto, chance: random.Random):
    found = Model(proto)
    known = {name: kind.elem_type for name, kind in found.types.items()}
    shown = {name: kind for name, kind in known.items() if chance.random() < 0.5}
    inferred = unified([node.proto for node in found.nodes], found.opset, shown)
    assert not inferred.keys() & shown.keys()
    assert all(known.get(name, kind) == kind for name, kind in inferred.items())


def test_a_type_is_assumed_and_declared_where_every_operator_allows_it() -> None:
    found = model(
        """[a] b = mine.Unknown(x)  [c] d = Relu(b)  [e] s = mine.Shape(d)  [f] t = Identity(s)
           [g] r = Reshape(d, t)  [h] y = mine.Last(r)"""
    )
    typed = with_types(found, "float16")
    assert [typed.elem_type(name) for name in "xbdr"] == [F, *[TensorProto.FLOAT16] * 3]
    assert typed.elem_type("s") is typed.elem_type("t") is None, "they are a shape, which is int64"
    assert found.elem_type("d") is None, "the model given is unchanged"
    assert with_types(typed, "float16") is typed


def test_operands_of_an_old_operator_that_broadcasts_the_second_one_are_not_swapped() -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"], broadcast=1, axis=1)
    (found,) = Model(helper.make_model(helper.make_graph([node], "g", [], []))).nodes
    assert not ops.is_commutative(found, 6)
