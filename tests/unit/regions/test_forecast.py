"""The forecast of a search counts multiplications at the given shapes and lists assumed dimensions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.graph.model import Model
from qdqspec.regions.forecast import forecast_tuning
from qdqspec.regions.inspect import forecast_line

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
        "multiplications (unknown sizes taken as 1: 'batch', 'steps', dimension 1 of input 'z'); nothing was built"
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
