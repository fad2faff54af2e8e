"""Positions and names of inserted pairs, and rejected sites."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_text import outputs_of, parsed
from random_models import ranges_for

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import Inserter, insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site

NET = """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
    [c] h = Conv<kernel_shape = [1, 1]>(x, w)  [r] t = Relu(h)  [a] y = Add(t, t) }"""
KERNEL = np.array([1.0, -2.0, 0.5, 4.0], np.float32).reshape(2, 2, 1, 1)


def net(text: str = NET, opset: int = 17, **constants: np.ndarray) -> Model:
    return parsed(text, opset, w=KERNEL, **constants)


def inserted(model: Model, *sites: Site) -> Model:
    numbers = Quantizer(model, ranges_for(model))
    made = insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto
    onnx.checker.check_model(made, full_check=True)
    return Model(made)


def site(
    tensor: str, *ends: tuple[str, int], fmt: str = "uint8", axis: int | None = None, weight: bool = False
) -> Site:
    return Site(
        tensor=tensor, consumers=tuple(Consumer(*e) for e in ends), format=fmt, axis=axis, weight=weight
    )


WEIGHT = site("w", ("c", 1), fmt="int8", axis=0, weight=True)


def order(model: Model) -> list[str]:
    return [node.name for node in model.nodes]


def test_an_activation_gets_q_and_dq_right_after_its_producer() -> None:
    model = inserted(net(), site("t", ("a", 0), ("a", 1)))
    assert order(model) == ["c", "r", "t_QuantizeLinear", "t_DequantizeLinear", "a"]
    assert model.by_name["t_QuantizeLinear"].inputs == ("t", "t_scale", "t_zero_point")
    assert model.by_name["t_DequantizeLinear"].inputs == ("t_quantized", "t_scale", "t_zero_point")
    assert model.by_name["a"].inputs == ("t_dequantized", "t_dequantized")


def test_a_stored_weight_takes_the_name_and_place_of_the_float_one() -> None:
    model = net(after=np.zeros(3, np.float32))
    model.proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2, 1, 1]))
    made = inserted(Model(model.proto), WEIGHT)
    assert order(made) == ["w_DequantizeLinear", "c", "r", "a"]
    assert made.by_name["c"].inputs == ("x", "w")
    assert list(made.initializers) == ["w_scale", "w_zero_point", "w_quantized", "after"]
    assert made.constants["w_quantized"].data_type == TensorProto.INT8
    np.testing.assert_array_equal(made.array("w_quantized").ravel(), [64, -127, 16, 127])
    assert [i.name for i in made.proto.graph.input] == ["x"]


INPUT = "g (float[2] x) => (float[2] x, float[2] y) { y = Relu(x) }"
CONSTANT = "g (float x) => (float y, float z) { y = Constant<value = float {1.0}>() z = Relu(x) }"
INTEGERS = "g (float[4] x) => (int64[1] y) { [s] t = Shape(x)  [n] y = Neg(t) }"
MISFITS: dict[str, tuple[str, str, *tuple[Site, ...]]] = {
    "unknown tensor": (NET, "tensor 'nobody' cannot be quantized: no node", site("nobody", ("c", 0))),
    "unknown node": (NET, "node 'nobody' does not read it at input 0", site("t", ("nobody", 0))),
    "another input": (NET, "node 'c' does not read it at input 0", site("t", ("c", 0))),
    "no consumer": (NET, "names no consumer", site("t")),
    "bias format": (NET, "int32 is for constants", site("t", ("a", 0), fmt="int32")),
    "no weight": (NET, "is no constant", site("t", ("a", 0), weight=True)),
    "integers": (INTEGERS, "the model: tensor 't' .* INT64, not FLOAT", site("t", ("n", 0))),
    "no such output": (NET, "it is not graph output 1 of the model", site("y", ("", 1))),
    "no output": (NET, "it is not graph output 0 of the model", site("t", ("", 0))),
    "graph input": (INPUT, "no node computes", site("x", ("", 0))),
    "constant": (CONSTANT, "no node computes", site("y", ("", 0))),
    "input twice": (
        NET, "two sites .* input 0 of node 'a'", site("t", ("a", 0)), site("t", ("a", 0), ("a", 1)),
    ),
    "output twice": (
        NET, "two sites .* feed a graph output", site("y", ("", 0)), site("y", ("", 0), fmt="int8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_sites_that_do_not_fit_the_model_are_rejected(name: str) -> None:
    text, message, *sites = MISFITS[name]
    model = net() if text == NET else parsed(text)
    with pytest.raises(PlacementError, match=message):
        inserted(model, *sites)


def test_float16_tensors_have_float16_scales_and_opset_19() -> None:
    model = parsed("g (float16[4] x) => (float16[4] y) { [r] t = Relu(x)  [n] y = Neg(t) }")
    numbers = Quantizer(model, {"t": TensorRange(-1.0, 2.0)})
    made = Model(insert_qdq(model, Placement(sites=frozenset({site("t", ("n", 0))})), numbers).proto)
    onnx.checker.check_model(made.proto, full_check=True)
    assert (made.array("t_scale").dtype, made.opset) == (np.float16, 19)


def test_the_opset_is_raised_to_13_with_a_note() -> None:
    model = net("g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [c] y = Conv(x, w) }", opset=11)
    inserter = Inserter(model, Quantizer(model, ranges_for(model)))
    for where in (site("x", ("c", 0)), WEIGHT):
        made = inserter.insert(Placement(sites=frozenset({where})))
        assert Model(made.proto).opset == 13
        assert made.notes == (
            "raised to opset 13, which its number formats need (was opset 11, IR version 8)",
        )
        onnx.checker.check_model(made.proto, full_check=True)


@pytest.mark.parametrize("shape", ["", "[2,3]"])
def test_a_constant_without_dimensions_is_not_stored_as_an_integer(shape: str) -> None:
    """TensorRT's compiler refuses stored integers of rank 0; of rank 1 they would raise that of a scalar result."""
    model = parsed(f"g (float{shape} x) => (float{shape} y) <float w = {{0.7}}> {{ [m] y = Mul(x, w) }}")
    scalar = site("w", ("m", 1), fmt="int8", weight=True)
    made = inserted(model, scalar)
    assert order(made) == ["w_QuantizeLinear", "w_DequantizeLinear", "m"]
    assert made.array("w") == np.float32(0.7)
    numbers = Quantizer(model, {})
    value = numbers.integer_weight(scalar) * numbers.params(scalar).scale.astype(np.float32)
    x = np.full([2, 3] if shape else [], 0.3, np.float32)
    np.testing.assert_array_equal(outputs_of(made, {"x": x})[0], x * value, strict=True)
