"""The forecast of a search counts multiplications at the given shapes and lists assumed dimensions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.graph.model import Model
from qdqspec.graph.regions.forecast import forecast_tuning
from qdqspec.graph.regions.inspect import forecast_line

TEXT = """<ir_version: 8, opset_import: ["": 17]>
  net (float[batch,steps,64] x, float[batch,?] z) => (float[batch,steps,128] y) {
  h = MatMul(x, w)  y = Relu(h) }"""


@pytest.fixture
def model() -> Model:
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 128), np.float32), "w"))
    return Model(proto)


def test_dynamic_dimensions_are_assumed_as_one_and_listed(model: Model) -> None:
    found = forecast_tuning(model, 10)
    assert found.macs == 64 * 128
    assert found.assumed == ("'batch'", "'steps'", "dimension 1 of input 'z'")
    assert forecast_line(found).endswith(
        "multiplications (unknown sizes taken as 1: 'batch', 'steps', dimension 1 of input 'z'); nothing was built; "
        "calibration before it, and the timing of its finalists and the comparison of outputs after it, come on top"
    )


def test_given_shapes_set_dimensions_of_the_same_name(model: Model) -> None:
    found = forecast_tuning(model, 10, {"x": (4, 50, 64)})
    assert found.macs == 4 * 50 * 64 * 128
    assert found.assumed == ("dimension 1 of input 'z'",)
    assert forecast_tuning(model, 10, {"x": (4, 50, 64), "z": (4, 2)}).assumed == ()


def test_a_negative_size_is_a_dynamic_dimension(model: Model) -> None:
    """Paddle2ONNX exports negative sizes."""
    model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    found = forecast_tuning(model, 10, {"x": (4, 50, 64), "z": (4, 2)})
    assert found.macs == 4 * 50 * 64 * 128


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize(("direction", "directions"), [("forward", 1), ("bidirectional", 2)])
def test_recurrent_layers_count_each_step(kind: str, gates: int, direction: str, directions: int) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[steps,batch,16] x) => (float[steps,{directions},batch,8] y) {{
        y = {kind}<direction = "{direction}", hidden_size = 8>(x, w, r) }}"""
    )
    for name, width in (("w", 16), ("r", 8)):
        weights = np.ones((directions, gates * 8, width), np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    found = forecast_tuning(Model(proto), 10, {"x": (20, 3, 16)})
    assert found.macs == 20 * 3 * directions * gates * 8 * (16 + 8)


def test_products_with_weights_in_blocks_of_bits_are_counted() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        net (float[n,7,32] x, uint8[24,2,8] w, float[48] s) => (float[n,7,24] y) {
        y = com.microsoft.MatMulNBits<K = 32, N = 24, bits = 4, block_size = 16>(x, w, s) }"""
    found = forecast_tuning(Model(onnx.parser.parse_model(text)), 10, {"x": (2, 7, 32)})
    assert found.macs == 2 * 7 * 32 * 24


_SCALES = "float s, uint8 z, float[12] t, uint8[12] u, float v, uint8 p"


@pytest.mark.parametrize(
    ("node", "weight"),
    [
        ("y = ConvInteger(q, w, z)", "uint8[12,4,3,3]"),
        ("y = QLinearConv(q, s, z, w, t, u, v, p)", "uint8[12,4,3,3]"),
        ("y = MatMulInteger(q, w, z)", "uint8[5,12]"),
        ("y = QLinearMatMul(q, s, z, w, t, u, v, p)", "uint8[5,12]"),
        ("y = com.microsoft.QGemm(q, s, z, w, t, u)", "uint8[5,12]"),
        ("y = com.microsoft.QGemm<transB = 1>(q, s, z, w, t, u)", "uint8[12,5]"),
        ("y = com.microsoft.DynamicQuantizeMatMul(q, w, t)", "uint8[5,12]"),
        ("y = com.microsoft.MatMulIntegerToFloat(q, w, s, t)", "uint8[5,12]"),
    ],
)
def test_products_of_integers_are_counted(node: str, weight: str) -> None:
    is_image = "Conv" in node
    left = "uint8[n,4,8,8] q" if is_image else "uint8[n,5] q"
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        net ({left}, {weight} w, {_SCALES}) => (y) {{ {node} }}"""
    shape = (2, 4, 8, 8) if is_image else (2, 5)
    found = forecast_tuning(Model(onnx.parser.parse_model(text)), 10, {"q": shape})
    assert found.macs == (2 * 6 * 6 * 12 * 4 * 3 * 3 if is_image else 2 * 5 * 12)
