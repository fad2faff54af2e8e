"""Scales of weights whose sums cannot overflow, and the encoding of integers that are not the nearest ones."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_models import layer_of, linear_model
from onnx import TensorProto, helper, numpy_helper

from qdqspec.accuracy.corrections.overflow import overflow_free_scale, overflows
from qdqspec.qdq.quantize.corrections import rounded, rounding_text
from qdqspec.qdq.quantize.formats import number_format
from qdqspec.qdq.quantize.scales import weight_params

INT8 = number_format("int8")


def product(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), depth=st.integers(1, 70), per_channel=st.booleans())
def test_finer_steps_do_not_overflow(seed: int, depth: int, per_channel: bool) -> None:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((depth, 5)).astype(np.float32) ** 3
    layer = layer_of(linear_model("MatMul", weight, 2))
    reduced = weight_params(weight, INT8, 1 if per_channel else None, reduce_range=True)
    full = weight_params(weight, INT8, 1 if per_channel else None)
    scale = overflow_free_scale(layer, weight, reduced)
    assert scale.shape == reduced.scale.shape
    assert (scale <= reduced.scale).all()
    assert (scale >= full.scale * 0.999).all()
    integers = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    assert not overflows(layer, integers)
    for x in (np.full((3, depth), 255, np.uint8), random.choice([0, 255], (3, depth)).astype(np.uint8)):
        np.testing.assert_array_equal(product(integers, x), x.astype(np.int64) @ integers)


def test_neighbours_of_opposite_sign_and_depthwise_kernels_have_8_bits() -> None:
    opposite = np.array([[1], [-1], [0.5], [-0.9]], np.float32)
    layer = layer_of(linear_model("MatMul", opposite, 2))
    reduced = weight_params(opposite, INT8, 1, reduce_range=True)
    np.testing.assert_allclose(overflow_free_scale(layer, opposite, reduced), 1 / 127, rtol=1e-6)
    depthwise = np.ones((4, 1, 3, 3), np.float32)
    layer = layer_of(linear_model("Conv", depthwise, 4, group=4))
    reduced = weight_params(depthwise, INT8, 0, reduce_range=True)
    np.testing.assert_allclose(overflow_free_scale(layer, depthwise, reduced), 1 / 127, rtol=1e-6)
    assert not overflows(layer, np.full(depthwise.shape, 127, np.int8))


@given(seed=st.integers(0, 99))
def test_rounding_is_equal_after_encoding_as_text(seed: int) -> None:
    random = np.random.default_rng(seed)
    nearest = random.integers(-60, 60, (3, 4)).astype(np.int8)
    integers = (nearest + random.integers(-3, 4, (3, 4))).astype(np.int8)
    np.testing.assert_array_equal(rounded(nearest, rounding_text(integers, nearest)), integers)
    assert rounding_text(nearest, nearest) == ""


@pytest.mark.parametrize("text", ["!", "aGVsbG8=", rounding_text(np.ones(3, np.int8), np.zeros(3, np.int8))])
def test_damaged_rounding_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        rounded(np.zeros(4, np.int8), text)
