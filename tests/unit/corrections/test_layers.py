"""Linear layers as matrices, and the correction of the mean shift of a layer with a quantized weight."""

from __future__ import annotations

from operator import length_hint

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from linear_models import layer_of, linear_model
from onnx_text import outputs_of
from written_cases import normal

from qdqspec.accuracy.corrections.bias import Means, bias_shift, observed_means
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scales import activation_params, dequantize, quantize, weight_params


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_means_of_windows_times_weights_are_means_of_the_outputs(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rank, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    inputs, made = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    attributes: dict[str, object] = {
        "group": groups,
        "strides": [data.draw(st.integers(1, 2)) for _ in range(rank)],
        "dilations": [data.draw(st.integers(1, 2)) for _ in range(rank)],
    }
    padding = data.draw(st.sampled_from(["", "pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if padding == "pads":
        attributes["pads"] = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    elif padding:
        attributes["auto_pad"] = padding
    if padding.startswith("SAME"):  # which ONNX Runtime refuses with dilations
        attributes["dilations"] = [1] * rank
    weight = random.standard_normal((made, inputs // groups, *kernel)).astype(np.float32)
    model = linear_model("Conv", weight, rank + 2, **attributes)
    x = random.standard_normal((2, inputs, *[7, 6][:rank])).astype(np.float32)
    layer = layer_of(model)
    means = layer.window_means(x)
    assert means is not None
    found = np.einsum("goc,gc->go", layer.matrix(weight), means).reshape(-1)
    (expected,) = outputs_of(model, {"x": x})
    np.testing.assert_allclose(found, expected.mean(axis=(0, *range(2, rank + 2))), atol=1e-5)


@pytest.mark.parametrize(("op", "transposed"), [("MatMul", 0), ("Gemm", 0), ("Gemm", 1)])
def test_rows_times_weights_are_the_outputs(op: str, transposed: int) -> None:
    weight, x = normal(*((3, 4) if transposed else (4, 3))), normal(5, 4, seed=1)
    model = linear_model(op, weight, 2, **({"transB": transposed} if op == "Gemm" else {}))
    layer = layer_of(model)
    found = layer.rows(x)[:, 0] @ layer.matrix(weight)[0].T
    np.testing.assert_allclose(found, outputs_of(model, {"x": x})[0], atol=1e-5)


def test_inputs_of_another_shape_have_no_rows() -> None:
    product = layer_of(linear_model("MatMul", np.ones((4, 3), np.float32), 2))
    assert product.rows(np.ones((4, 5), np.float32)) is None
    convolution = layer_of(linear_model("Conv", np.ones((2, 4, 1, 1), np.float32), 4))
    other = np.ones((1, 3, 5, 5), np.float32)
    assert convolution.rows(other) is None
    assert convolution.window_means(other) is None


@pytest.mark.parametrize(("groups", "is_quantized"), [(1, False), (2, False), (4, False), (1, True)])
def test_the_shift_is_the_mean_difference_of_the_outputs(groups: int, *, is_quantized: bool) -> None:
    """It includes that of a quantized input."""
    random = np.random.default_rng(groups + 2 * is_quantized)
    weight = random.standard_normal((8, 4 // groups, 1, 1)).astype(np.float32)
    layer = layer_of(linear_model("Conv", weight, 4, group=groups))
    params = weight_params(weight, number_format("int4"), 0)
    integers = quantize(weight, params)
    samples = [{"x": random.uniform(0, 0.4, (1, 4, 5, 5)).astype(np.float32)} for _ in range(4)]
    pair = activation_params(TensorRange(0.0, 100.0), number_format("uint8"))  # most values become zero
    ((_, fit, held_out),) = observed_means([layer], samples, {layer.weight: pair} if is_quantized else {})
    x = np.concatenate([sample["x"] for sample in samples[::2]]).transpose(0, 2, 3, 1)
    stored = dequantize(quantize(x, pair), pair) if is_quantized else x

    def outputs(values: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        rows, by_group = values.reshape(-1, groups, 4 // groups), kernel.reshape(groups, 8 // groups, -1)
        return np.einsum("rgc,goc->rgo", rows, by_group).mean(axis=0).reshape(-1)

    expected = outputs(stored, dequantize(integers, params)) - outputs(x, weight)
    assert not is_quantized or np.abs(expected).max() > 0.05
    corrected = bias_shift(layer, weight, params, integers, fit, held_out)
    assert corrected is not None
    np.testing.assert_allclose(corrected, -expected, rtol=1e-4, atol=1e-5)


def test_a_shift_that_other_samples_do_not_confirm_is_not_corrected() -> None:
    weight = np.array([[0.3, -0.7]], np.float32).reshape(1, 2, 1, 1)
    layer = layer_of(linear_model("Conv", weight, 4))
    params = weight_params(weight, number_format("int8"), 0)
    integers = quantize(weight, params)
    mean = np.array([[1.0, 0.0]], np.float32)
    fit, other = Means(mean, mean), Means(-mean, -mean)
    assert bias_shift(layer, weight, params, integers, fit, fit) is not None
    assert bias_shift(layer, weight, params, integers, fit, other) is None


def test_means_are_of_the_samples_within_the_time_limit() -> None:
    layer = layer_of(linear_model("Conv", normal(8, 4, 1, 1), 4))
    sample = {"x": normal(1, 4, 5, 5)}
    for late, layers in ((2, 1), (1, 0)):  # after one sample there is none of the other part
        samples = iter([sample] * 8)
        found = list(observed_means([layer], samples, {}, lambda: length_hint(samples) <= 8 - late))  # noqa: B023
        assert (len(found), length_hint(samples)) == (layers, 8 - late)
