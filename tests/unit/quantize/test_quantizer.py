from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx_text import parsed

from qdqspec.errors import ConfigError, ModelError, PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.formats import FORMATS, QuantParams
from qdqspec.qdq.quantizer import (
    Quantizer,
    activation_params,
    packed,
    unpacked,
    weight_params,
)
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Consumer, Site


def activation(tensor: str, fmt: str = "uint8") -> Site:
    return Site(tensor=tensor, consumers=(Consumer("n", 0),), format=fmt)


def weight_of(tensor: str) -> Site:
    return Site(tensor=tensor, consumers=(), format="int8", weight=True)


def model_with_weight(weight: np.ndarray) -> Model:
    return parsed("g (float[n] x) => (float[m] y) { y = MatMul(x, w) }", 19, ir=9, w=weight)


def test_reduce_range_applies_to_8_bit_products_only() -> None:
    weight = np.ones((2, 2), np.float32)
    params = weight_params(weight, FORMATS["int16"], None, reduce_range=True)
    assert params.quantize(weight).max() == 32767


@pytest.mark.parametrize(
    ("site", "error", "said"),
    [
        (activation("y"), PlacementError, "'y' has no calibrated range"),
        (weight_of("x"), PlacementError, "'x' is placed as a weight but is no constant"),
        (activation("x", "unit8"), ConfigError, "did you mean 'uint8'"),
        (weight_of("w"), ModelError, "weight 'w' holds NaN"),
        (replace(activation("w", "int32"), weight=True), PlacementError, "product that is not quantized"),
    ],
)
def test_a_site_that_cannot_be_quantized_is_an_error(site: Site, error: type[Exception], said: str) -> None:
    model = model_with_weight(np.array([[1, np.nan]], np.float32))
    with pytest.raises(error, match=said):
        Quantizer(model, {"x": TensorRange(0, 1)}).params(site)


@pytest.mark.parametrize("weak", [0, 1e-20, 1e-9])
def test_a_bias_fits_in_32_bits_beside_a_channel_of_zeros(weak: float) -> None:
    weight = np.array([[weak, 0], [1, -2]], np.float32)
    params = weight_params(weight, FORMATS["int8"], 0)
    input_scale, bias = 0.01, 3
    assert bias / (input_scale * params.scale[0]) < 2**31
    assert params.scale[1] == np.float32(2 / 127)
    np.testing.assert_array_equal(params.quantize(weight), [[0, 0], [64, -127]])


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 3.4e38])
def test_scales_stay_normal_floats_for_extreme_values(largest: float) -> None:
    with warnings.catch_warnings(action="error"):
        weight = np.array([[largest, 0]], np.float32)
        for params in (
            weight_params(weight, FORMATS["int8"], 0),
            activation_params(TensorRange(-largest, largest), FORMATS["uint8"]),
        ):
            assert (params.scale >= np.finfo(np.float32).smallest_normal).all()
            assert np.isfinite(params.dequantize(params.quantize(weight))).all()


def test_a_bias_beyond_32_bits_saturates() -> None:
    fmt = FORMATS["int32"]
    tiny = QuantParams(fmt, np.float32([1e-9]), np.zeros(1, np.int32), axis=0)
    with warnings.catch_warnings(action="error"):
        assert tiny.quantize(np.float32([300])) == 2**31 - 1
        assert tiny.quantize(np.float32([-300])) == -(2**31)


@given(seed=st.integers(0, 99))
def test_rounding_is_equal_after_encoding_as_text(seed: int) -> None:
    random = np.random.default_rng(seed)
    nearest = random.integers(-60, 60, (3, 4)).astype(np.int8)
    integers = (nearest + random.integers(-3, 4, (3, 4))).astype(np.int8)
    steps = unpacked(packed(integers - nearest), np.dtype(np.int8), nearest.size)
    np.testing.assert_array_equal(nearest + steps.reshape(nearest.shape), integers)
