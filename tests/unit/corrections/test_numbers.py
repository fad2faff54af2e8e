"""Scales of weights whose sums cannot overflow, and rounding of weights by the inputs of a layer."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_models import layer_of, linear_model
from onnx import TensorProto, helper, numpy_helper

from qdqspec.corrections.overflow import PairMaxima, overflow_free_scale, overflows, without_overflow
from qdqspec.corrections.statistics import InputStatistics, Means
from qdqspec.corrections.weights import gptq, noise_aware, output_errors, rounded_weight
from qdqspec.quantize.corrections import rounded, rounding_text
from qdqspec.quantize.formats import number_format
from qdqspec.quantize.scales import quantize, weight_params

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


def test_neighbours_in_a_convolution_are_channels_before_kernel_positions() -> None:
    weight = np.zeros((1, 2, 1, 2), np.int8)
    layer = layer_of(linear_model("Conv", weight.astype(np.float32), 4))
    weight[0, :, 0, 0] = 100
    assert overflows(layer, weight)
    weight[0, :, 0, :] = [[100, 100], [0, 0]]
    assert not overflows(layer, weight)


@given(seed=st.integers(0, 999), columns=st.integers(1, 9))
def test_pairs_that_overflow_get_the_nearest_integers(seed: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    integers = random.integers(-127, 128, (columns, 3)).astype(np.int8)
    nearest = random.integers(-63, 64, (columns, 3)).astype(np.int8)
    layer = layer_of(linear_model("MatMul", integers.astype(np.float32), 2))
    found = without_overflow(layer, integers, nearest)
    assert not overflows(layer, found)
    assert ((found == integers) | (found == nearest)).all()
    if not overflows(layer, integers):
        np.testing.assert_array_equal(found, integers)


def inputs(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, 3)) @ random.standard_normal((3, columns)) + 0.5).astype(np.float32)


def statistics(x: np.ndarray, step: float = 0.0) -> InputStatistics:
    """Those of inputs (row, column) that are quantized with this step, or exact."""
    quantized = np.rint(x / step) * step if step else x
    return InputStatistics(
        moments=(x.T @ x)[None],
        sums=Means(x.sum(axis=0)[None], quantized.sum(axis=0)[None]),
        noise=((quantized - x) ** 2).sum(axis=0)[None],
        rows=len(x),
    )


@pytest.mark.parametrize("saturates", [False, True])
def test_rounding_by_correlated_inputs_has_a_smaller_output_error(*, saturates: bool) -> None:
    seen, weight = inputs(300, 24), np.random.default_rng(1).standard_normal((24, 8)).astype(np.float32)
    x, others = seen[:200], seen[200:]
    layer = layer_of(linear_model("MatMul", weight, 2))
    params = weight_params(weight, INT8, 1, reduce_range=saturates)
    bound = PairMaxima.of_any_input(layer) if saturates else None
    integers = rounded_weight(layer, weight, params, statistics(x), statistics(others), bound=bound)
    assert integers is not None
    nearest = quantize(weight, params)

    def errors(stored: np.ndarray) -> np.ndarray:
        return ((others @ (stored * params.scale - weight)) ** 2).sum(axis=0)

    assert errors(integers).sum() < 0.5 * errors(nearest).sum()
    assert (errors(integers) <= errors(nearest) * 1.0001).all()  # of each output
    assert np.abs(integers.astype(int)).max() <= (63 if saturates else 127)
    assert not (saturates and overflows(layer, integers))


def test_nearest_integers_are_kept_where_rounding_by_other_inputs_is_worse() -> None:
    weight = np.random.default_rng(1).standard_normal((24, 8)).astype(np.float32)
    layer = layer_of(linear_model("MatMul", weight, 2))
    params = weight_params(weight, INT8, 1)
    assert rounded_weight(layer, weight, params, statistics(inputs(200, 24)), statistics(np.eye(24))) is None


def test_rounding_for_noisy_inputs_has_a_smaller_error_with_quantized_inputs() -> None:
    """The inputs have three directions of much power, and noise in all of 24."""
    x = inputs(4000, 24) + 0.02 * np.random.default_rng(3).standard_normal((4000, 24)).astype(np.float32)
    fit, held_out, others = x[:2000], x[2000:3000], x[3000:]
    weight = np.random.default_rng(1).standard_normal((24, 8)).astype(np.float32)
    layer = layer_of(linear_model("MatMul", weight, 2))
    params = weight_params(weight, INT8, 1)
    errors = []
    for step in (0.0, 0.1):  # statistics without and with the noise of inputs
        found = rounded_weight(layer, weight, params, statistics(fit, step), statistics(held_out, step))
        assert found is not None
        read = np.rint(others / 0.1) * 0.1
        errors.append(float(((read @ (found * params.scale) - others @ weight) ** 2).sum()))
    assert errors[1] < 0.8 * errors[0]


def test_differences_from_the_nearest_integers_fit_into_a_scheme() -> None:
    """With eight nearly equal inputs, weights of their mean, .75, have least noise: -127 would become 95."""
    random = np.random.default_rng(0)
    x = random.standard_normal((400, 1)) + 1e-3 * random.standard_normal((400, 8))
    weight = np.array([[-1.0], *[[1.0]] * 7], np.float32)
    layer = layer_of(linear_model("MatMul", weight, 2))
    params = weight_params(weight, INT8, 1)
    known = statistics(x.astype(np.float32), 0.05)
    nearest = quantize(weight, params)
    found = rounded_weight(layer, weight, params, known, known)
    assert isinstance(rounding_text(nearest if found is None else found, nearest), str)


@given(seed=st.integers(0, 999), columns=st.integers(1, 12), rows=st.integers(1, 30), power=st.floats(0, 10))
def test_no_weight_has_a_smaller_error_with_noisy_inputs(
    seed: int, columns: int, rows: int, power: float
) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns))
    noise = power * random.random((1, columns))
    matrix = random.standard_normal((1, 4, columns))
    known = InputStatistics(moments=(x.T @ x)[None], sums=Means(x, x), noise=noise, rows=rows)
    found = noise_aware(matrix, known.moments, known.noise)
    least = output_errors(known, matrix, found)
    for other in (matrix, found + 0.01 * random.standard_normal(found.shape), 0.99 * found):
        assert (least <= output_errors(known, matrix, other) + 1e-6).all()


def test_weights_of_zero_inputs_are_rounded_to_nearest() -> None:
    weight = np.array([[1.4, -2.6]])
    assert gptq(weight, np.zeros((2, 2)), np.ones((1, 2)), -8, 7).tolist() == [[1, -3]]


def test_groups_are_rounded_independently() -> None:
    random = np.random.default_rng(2)
    rows, weight = random.standard_normal((5, 60, 9)), random.standard_normal((5, 2, 9))
    rows[1, :, 3] = rows[2] = 0  # a column, and a group, without input
    moments, step = rows.swapaxes(1, 2) @ rows, np.full(weight.shape, 0.05)
    alone = [gptq(*group, -63, 63) for group in zip(weight, moments, step, strict=True)]
    np.testing.assert_array_equal(gptq(weight, moments, step, -63, 63), alone)
    assert (alone[0] != np.rint(weight[0] / 0.05)).any()
    np.testing.assert_array_equal(alone[2], np.clip(np.rint(weight[2] / 0.05), -63, 63))


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
