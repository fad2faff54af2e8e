"""Positions and names of inserted pairs, and rejected sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from random_models import ranges_for

from qdqspec.errors import ModelError, PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import Inserter, insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site


def parsed(text: str, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')


@dataclass
class Net:
    """``x -> Conv(w) -> Relu -> Add(Relu, Relu) -> y``, node names c, r, a."""

    proto: onnx.ModelProto = field(
        default_factory=lambda: parsed(
            """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
                [c] h = Conv<kernel_shape = [1, 1]>(x, w)
                [r] t = Relu(h)
                [a] y = Add(t, t)
            }"""
        )
    )

    def __post_init__(self) -> None:
        weight = np.array([1.0, -2.0, 0.5, 4.0], np.float32).reshape(2, 2, 1, 1)
        self.proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))

    def insert(self, *sites: Site, floating: Collection[Site] = ()) -> Model:
        model = Model(self.proto)
        numbers = Quantizer(model, ranges_for(model))
        return Model(
            insert_qdq(model, Placement(sites=frozenset(sites)), numbers, floating=frozenset(floating)).proto
        )


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
    model = Net().insert(site("t", ("a", 0), ("a", 1)))
    assert order(model) == ["c", "r", "t_QuantizeLinear", "t_DequantizeLinear", "a"]
    assert model.by_name["t_QuantizeLinear"].inputs == ("t", "t_scale", "t_zero_point")
    assert model.by_name["t_DequantizeLinear"].inputs == ("t_quantized", "t_scale", "t_zero_point")
    assert model.by_name["a"].inputs == ("t_dequantized", "t_dequantized")


def test_names_of_pairs_do_not_collide_with_names_of_the_model() -> None:
    net = Net()
    net.proto.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "t_scale"))
    net.proto.graph.node[0].name = "c"
    net.proto.graph.node[1].name = "t_QuantizeLinear"
    model = net.insert(site("t", ("a", 0), ("a", 1)))
    assert model.by_name["t_QuantizeLinear~1"].inputs[1] == "t_scale~1"


def test_a_stored_weight_takes_the_name_and_place_of_the_float_one() -> None:
    net = Net()
    net.proto.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "after"))
    model = net.insert(WEIGHT)
    assert order(model) == ["w_DequantizeLinear", "c", "r", "a"]
    assert model.by_name["c"].inputs == ("x", "w")
    assert list(model.initializers) == ["w_scale", "w_zero_point", "w_quantized", "after"]
    assert model.constants["w_quantized"].data_type == TensorProto.INT8
    np.testing.assert_array_equal(model.array("w_quantized").ravel(), [64, -127, 16, 127])


@pytest.mark.parametrize("reader", ["node", "body", "output"])
def test_a_float_weight_with_another_reader_is_kept(reader: str) -> None:
    net = Net()
    info = helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2, 1, 1])
    if reader == "node":
        net.proto.graph.node.append(helper.make_node("Neg", ["w"], ["z"], "n"))
    if reader == "output":
        net.proto.graph.output.append(info)
    if reader == "body":
        body = helper.make_graph(
            [helper.make_node("Neg", ["w"], ["z"])], "b", [], [helper.make_tensor_value_info("z", 1, None)]
        )
        net.proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        net.proto.graph.node.append(
            helper.make_node("If", ["yes"], ["i"], then_branch=body, else_branch=body)
        )
    model = net.insert(WEIGHT)
    assert model.array("w").dtype == np.float32
    assert model.by_name["c"].inputs[1].startswith("w_dequantized")


def test_a_quantized_weight_is_removed_from_the_graph_inputs() -> None:
    net = Net()
    net.proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2, 1, 1]))
    assert [i.name for i in net.insert(WEIGHT).proto.graph.input] == ["x"]


MISFITS: Mapping[str, tuple[Site, str]] = {
    "unknown tensor": (site("nobody", ("c", 0)), "tensor 'nobody' cannot be quantized: no node"),
    "unknown node": (site("t", ("nobody", 0)), "node 'nobody' does not read it at input 0"),
    "another input": (site("t", ("c", 0)), "node 'c' does not read it at input 0"),
    "no consumer": (site("t"), "names no consumer"),
    "bias format": (site("t", ("a", 0), fmt="int32"), "int32 is for constants"),
    "no weight": (site("t", ("a", 0), weight=True), "is no constant"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_site_that_does_not_fit_the_model_is_rejected(name: str) -> None:
    wrong, message = MISFITS[name]
    with pytest.raises(PlacementError, match=message):
        Net().insert(wrong)


def test_a_site_on_an_integer_tensor_is_rejected() -> None:
    model = Model(parsed("g (float[4] x) => (int64[1] y) { [s] t = Shape(x)  [n] y = Neg(t) }"))
    numbers = Quantizer(model, ranges_for(model))
    with pytest.raises(PlacementError, match=r"the model: tensor 't' .* INT64, not FLOAT"):
        insert_qdq(model, Placement(sites=frozenset({site("t", ("n", 0))})), numbers)


def test_two_sites_for_one_consumer_are_rejected() -> None:
    with pytest.raises(PlacementError, match=r"two sites .* input 0 of node 'a'"):
        Net().insert(site("t", ("a", 0)), site("t", ("a", 0), ("a", 1)))


def test_float16_tensors_have_float16_scales_and_opset_19() -> None:
    model = Model(parsed("g (float16[4] x) => (float16[4] y) { [r] t = Relu(x)  [n] y = Neg(t) }"))
    numbers = Quantizer(model, {"t": TensorRange(-1.0, 2.0)})
    inserted = insert_qdq(model, Placement(sites=frozenset({site("t", ("n", 0))})), numbers)
    onnx.checker.check_model(inserted.proto, full_check=True)
    assert Model(inserted.proto).array("t_scale").dtype == np.float16
    assert Model(inserted.proto).opset == 19


def test_the_opset_is_raised_to_13_with_a_note() -> None:
    net = Net(parsed("g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [c] y = Conv(x, w) }", opset=11))
    model = Model(net.proto)
    inserter = Inserter(model, Quantizer(model, ranges_for(model)))
    for where in (site("x", ("c", 0)), WEIGHT):
        inserted = inserter.insert(Placement(sites=frozenset({where})))
        assert Model(inserted.proto).opset == 13
        assert inserted.notes == (
            "raised to opset 13, which its number formats need (was opset 11, IR version 8)",
        )
        onnx.checker.check_model(inserted.proto, full_check=True)


def test_a_model_whose_opset_cannot_be_raised_is_an_error_with_the_reason() -> None:
    net = Net(
        parsed(
            "g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [n] h = NoSuchOperator(x) [c] y = Conv(h, w) }", 11
        )
    )
    with pytest.raises(ModelError, match="from 11 to 13"):
        net.insert(WEIGHT)


@pytest.mark.parametrize("shape", ["", "[2,3]"])
def test_a_constant_without_dimensions_is_not_stored_as_an_integer(shape: str) -> None:
    """TensorRT's compiler refuses stored integers of rank 0; of rank 1 they would raise that of a scalar result."""
    net = Net(parsed(f"g (float{shape} x) => (float{shape} y) <float w = {{0.7}}> {{ [m] y = Mul(x, w) }}"))
    del net.proto.graph.initializer[1:]
    scalar = site("w", ("m", 1), fmt="int8", weight=True)
    quantized = net.insert(scalar)
    assert order(quantized) == ["w_QuantizeLinear", "w_DequantizeLinear", "m"]
    assert quantized.array("w") == np.float32(0.7)
    onnx.checker.check_model(quantized.proto, full_check=True)
    numbers = Quantizer(Model(net.proto), {})
    value = numbers.integer_weight(scalar) * numbers.params(scalar).scale.astype(np.float32)
    x = np.full([2, 3] if shape else [], 0.3, np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = quantized.proto.SerializeToString()
    (y,) = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    np.testing.assert_array_equal(y, x * value, strict=True)
