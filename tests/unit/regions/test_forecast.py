"""The forecast of a search counts multiplications at the given shapes and lists assumed dimensions."""

from __future__ import annotations

import pytest
from onnx_text import parsed

from qdqspec.graph.model import Model
from qdqspec.graph.regions.forecast import forecast_tuning
from qdqspec.graph.regions.inspect import forecast_line

TEXT = """net (float[batch,steps,64] x, float[batch,?] z) => (float[batch,steps,128] y) {
  h = MatMul(x, w)  y = Relu(h) }"""


@pytest.fixture
def model() -> Model:
    return parsed(TEXT, w=(64, 128))


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
    model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1  # as Paddle2ONNX writes
    assert forecast_tuning(model, 10, {"x": (4, 50, 64)}).macs == found.macs


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize(("direction", "directions"), [("forward", 1), ("bidirectional", 2)])
def test_recurrent_layers_count_each_step(kind: str, gates: int, direction: str, directions: int) -> None:
    model = parsed(
        f"""net (float[steps,batch,16] x) => (float[steps,{directions},batch,8] y) {{
        y = {kind}<direction = "{direction}", hidden_size = 8>(x, w, r) }}""",
        w=(directions, gates * 8, 16),
        r=(directions, gates * 8, 8),
    )
    found = forecast_tuning(model, 10, {"x": (20, 3, 16)})
    assert found.macs == 20 * 3 * directions * gates * 8 * (16 + 8)


_SCALES = "float s, uint8 z, float[12] t, uint8[12] u, float v, uint8 p"
_IMAGE, _CONV = ("uint8[n,4,8,8] q", (2, 4, 8, 8)), 2 * 6 * 6 * 12 * 4 * 3 * 3
_ROWS, _PRODUCT = ("uint8[n,5] q", (2, 5)), 2 * 5 * 12


@pytest.mark.parametrize(
    ("node", "weight", "left", "macs"),
    [
        ("y = ConvInteger(q, w, z)", "uint8[12,4,3,3]", _IMAGE, _CONV),
        ("y = QLinearConv(q, s, z, w, t, u, v, p)", "uint8[12,4,3,3]", _IMAGE, _CONV),
        ("y = MatMulInteger(q, w, z)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = QLinearMatMul(q, s, z, w, t, u, v, p)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.QGemm(q, s, z, w, t, u)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.QGemm<transB = 1>(q, s, z, w, t, u)", "uint8[12,5]", _ROWS, _PRODUCT),
        ("y = com.microsoft.DynamicQuantizeMatMul(q, w, t)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.MatMulIntegerToFloat(q, w, s, t)", "uint8[5,12]", _ROWS, _PRODUCT),
        (
            "y = com.microsoft.MatMulNBits<K = 32, N = 24, bits = 4, block_size = 16>(q, w, t)",
            "uint8[24,2,8]",
            ("float[n,7,32] q", (2, 7, 32)),
            2 * 7 * 32 * 24,
        ),
    ],
)
def test_products_of_integers_are_counted(
    node: str, weight: str, left: tuple[str, tuple[int, ...]], macs: int
) -> None:
    model = parsed(f"net ({left[0]}, {weight} w, {_SCALES}) => (y) {{ {node} }}")
    assert forecast_tuning(model, 10, {"q": left[1]}).macs == macs
