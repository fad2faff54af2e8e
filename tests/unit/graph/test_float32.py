"""The float32 form of a float16 model: the same outputs, inputs and outputs of the same types, a valid model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from onnx import TensorProto, helper
from onnx_text import outputs_of, parsed
from random_models import onnx_models, random_inputs

from qdqspec.errors import ModelError
from qdqspec.graph.float32 import computes_in_float16, in_float32, is_converted
from qdqspec.graph.model import Model
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


@given(onnx_models())
def test_the_float32_form_of_any_model_computes_the_same(proto: onnx.ModelProto) -> None:
    half = Model(in_float16(proto))
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
        "v = Cast<to = 1>(w)  c = Cast<to = 1>(x)  m = MatMul(c, v)  h = Cast<to = 10>(m)  y = Relu(h)",
        PORTS,
    ),
    "a float32 parameter": (
        (
            "a = Constant<value_ints = [0]>()  s = Constant<value = float[3] {1.0, 1.0, 1.0}>()  u = Unsqueeze(x, a)"
            "  r = Resize(u, , s)  p = Squeeze(r, a)  y = MatMul(p, w)"
        ),
        PORTS,
    ),
    "bounds": ("low = Constant<value = float16 {48128}>()  y = Clip(x, low)", PORTS),
    "a normalization": (
        "g = Constant<value = float16[4] {16640, 16640, 48128, 11878}>()  y = LayerNormalization(x, g)",
        PORTS,
    ),
    "a fill value": (
        "s = Shape(x)  f = ConstantOfShape<value = float16[1] {16640}>(s)  y = Mul(x, f)",
        PORTS,
    ),
    "a float32 part": ("c = Cast<to = 1>(x)  e = Exp(c)  h = Cast<to = 10>(e)  y = MatMul(h, w)", PORTS),
    "the type of another tensor": (
        "i = Shape(x)  f = CastLike(i, x)  z = ReduceSum<keepdims = 0>(f)  y = Add(x, z)",
        PORTS,
    ),
    "an input that is an output": ("y = Relu(x)", "(float16[2, 4] x) => (float16[2, 4] y, float16[2, 4] x)"),
    "a weight that is an output": (
        "y = MatMul(x, w)",
        "(float16[2, 4] x) => (float16[2, 4] y, float16[4, 4] w)",
    ),
    "pairs": (
        (
            "z = Constant<value = uint8 {128}>()  s = Constant<value = float16 {11878}>()  q = QuantizeLinear(x, s, z)"
            "  d = DequantizeLinear(q, s, z)  y = MatMul(d, w)"
        ),
        PORTS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_with_types_of_their_own_are_converted(name: str) -> None:
    assert_alike(half_model(*CASES[name]))


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
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT16, [2]))
    graph = helper.make_graph(
        [helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)],
        "g",
        [helper.make_value_info("x", kind)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)],
    )
    with pytest.raises(ModelError, match="'x' is no tensor"):
        in_float32(Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])))


def test_float16_that_is_only_stored_is_no_computation() -> None:
    stored = half_model(
        "v = Cast<to = 1>(w)  m = MatMul(x, v)  y = Relu(m)", "(float[2, 4] x) => (float[2, 4] y)"
    )
    assert not computes_in_float16(stored)
