"""Linear layers as matrices: the product of rows and weights equals the output of the operator."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_models import layer_of, linear_model
from onnx import helper

from qdqspec.corrections.layers import LinearLayer, find_layers
from qdqspec.graph.model import Model
from qdqspec.types import Consumer, Site


def outputs(model: Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


def rows_of(layer: LinearLayer, value: np.ndarray, most: int) -> np.ndarray:
    patches = layer.patches(value, most)
    assert patches is not None
    return layer.grouped(patches)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_windows_times_weights_are_a_convolution(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rank, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    inputs, made = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    attributes: dict[str, object] = {
        "group": groups,
        "strides": [data.draw(st.integers(1, 2)) for _ in range(rank)],
        "dilations": [data.draw(st.integers(1, 2)) for _ in range(rank)],
    }
    if data.draw(st.booleans()):
        attributes["pads"] = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    weight = random.standard_normal((made, inputs // groups, *kernel)).astype(np.float32)
    model = linear_model("Conv", weight, rank + 2, **attributes)
    x = random.standard_normal((2, inputs, *[7] * rank)).astype(np.float32)
    layer = layer_of(model)
    rows = rows_of(layer, x, 10_000)
    found = np.matmul(rows, layer.matrix(weight).transpose(0, 2, 1))  # (group, row, output)
    expected = np.moveaxis(outputs(model, x), 1, -1).reshape(-1, made)
    np.testing.assert_allclose(np.concatenate(list(found), axis=-1), expected, atol=1e-4)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_padding_follows_the_shape(auto_pad: str) -> None:
    weight = np.random.default_rng(0).standard_normal((2, 1, 3, 2)).astype(np.float32)
    model = linear_model("Conv", weight, 4, auto_pad=auto_pad, strides=[2, 1])
    x = np.random.default_rng(1).standard_normal((1, 1, 6, 5)).astype(np.float32)
    layer = layer_of(model)
    rows = rows_of(layer, x, 1000)
    expected = np.moveaxis(outputs(model, x), 1, -1).reshape(-1, 2)
    np.testing.assert_allclose(rows[0] @ layer.matrix(weight)[0].T, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "transposed", "shape"), [("MatMul", 0, (2, 5, 4)), ("Gemm", 0, (5, 4)), ("Gemm", 1, (5, 4))]
)
def test_rows_times_weights_are_a_product(op: str, transposed: int, shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(0).standard_normal((3, 4) if transposed else (4, 3)).astype(np.float32)
    model = linear_model(op, weight, len(shape), **({"transB": transposed} if op == "Gemm" else {}))
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    layer = layer_of(model)
    rows = rows_of(layer, x, 1000)
    np.testing.assert_allclose(
        rows[0] @ layer.matrix(weight)[0].T, outputs(model, x).reshape(-1, 3), atol=1e-5
    )


def test_selected_rows_are_evenly_spaced() -> None:
    model = linear_model("MatMul", np.ones((4, 3), np.float32), 2)
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    rows = rows_of(layer_of(model), x, 3)
    assert rows[0, :, 0].tolist() == [0, 196, 396]


def test_a_weight_with_two_readers_is_not_a_layer() -> None:
    model = linear_model("MatMul", np.ones((4, 4), np.float32), 2)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    proto.graph.node.append(helper.make_node("MatMul", ["y", "w"], ["z"], name="other"))
    sites = [Site(tensor="w", consumers=(Consumer("n", 1),), format="int8", weight=True)]
    assert find_layers(Model(proto), sites) == {}
