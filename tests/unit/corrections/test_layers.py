"""Linear layers as matrices: the correction of the mean shift by a quantized weight, and sums that overflow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import length_hint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx_text import outputs_of, parsed
from written_cases import digits_case, normal

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.corrections.layers import LinearLayer, find_layers
from qdqspec.accuracy.corrections.numbers import bias_shift, observed_means
from qdqspec.accuracy.corrections.overflow import PairMaxima, SumLimit, observed_limits
from qdqspec.app.session import Session
from qdqspec.graph.model import Model
from qdqspec.qdq.formats import QuantParams, number_format
from qdqspec.qdq.quantizer import activation_params, weight_params
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Consumer, Inputs, QuantizeRules, Site, TuneRules

SITE = Site(tensor="w", consumers=(Consumer("n", 1),), format="int8", weight=True)


def linear_model(op: str, weight: np.ndarray, rank: int, **attributes: object) -> Model:
    words = ", ".join(f"{name} = {json.dumps(value)}" for name, value in attributes.items())
    shape = ", ".join("?" * rank)
    return parsed(f"g (float[{shape}] x) => (y) {{ [n] y = {op}{words and f'<{words}>'}(x, w) }}", w=weight)


def layer_of(model: Model) -> LinearLayer:
    return find_layers(model, [SITE])["w"]


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
    integers = params.quantize(weight)
    samples = [{"x": random.uniform(0, 0.4, (1, 4, 5, 5)).astype(np.float32)} for _ in range(4)]
    pair = activation_params(TensorRange(0.0, 100.0), number_format("uint8"))  # most values become zero
    ((_, fit, held_out),) = observed_means([layer], samples, {layer.weight: pair} if is_quantized else {})
    x = np.concatenate([sample["x"] for sample in samples[::2]]).transpose(0, 2, 3, 1)
    stored = pair.dequantize(pair.quantize(x)) if is_quantized else x

    def outputs(values: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        rows, by_group = values.reshape(-1, groups, 4 // groups), kernel.reshape(groups, 8 // groups, -1)
        return np.einsum("rgc,goc->rgo", rows, by_group).mean(axis=0).reshape(-1)

    expected = outputs(stored, params.dequantize(integers)) - outputs(x, weight)
    assert not is_quantized or np.abs(expected).max() > 0.05
    corrected = bias_shift(layer, weight, params, integers, fit, held_out)
    assert corrected is not None
    np.testing.assert_allclose(corrected, -expected, rtol=1e-4, atol=1e-5)


def test_a_shift_that_other_samples_do_not_confirm_is_not_corrected() -> None:
    weight = np.array([[0.3, -0.7]], np.float32).reshape(1, 2, 1, 1)
    layer = layer_of(linear_model("Conv", weight, 4))
    params = weight_params(weight, number_format("int8"), 0)
    integers = params.quantize(weight)
    mean = np.array([[1.0, 0.0]], np.float32)
    fit, other = np.array([mean, mean]), np.array([-mean, -mean])
    assert bias_shift(layer, weight, params, integers, fit, fit) is not None
    assert bias_shift(layer, weight, params, integers, fit, other) is None


def test_means_are_of_the_samples_within_the_time_limit() -> None:
    layer = layer_of(linear_model("Conv", normal(8, 4, 1, 1), 4))
    sample = {"x": normal(1, 4, 5, 5)}
    for late, layers in ((2, 1), (1, 0)):  # after one sample there is none of the other part
        samples = iter([sample] * 8)
        found = list(observed_means([layer], samples, {}, lambda: length_hint(samples) <= 8 - late))  # noqa: B023
        assert (len(found), length_hint(samples)) == (layers, 8 - late)


# ---- 8-bit weights by the largest sums of two products, of any inputs and of those on calibration data


INT8, UINT8 = number_format("int8"), number_format("uint8")
MOST = 2**15 - 1


def limits_of(model: Model, values: Mapping[str, Array], sites: Sequence[Site] = (SITE,)) -> SumLimit:
    def observe(tensors: Sequence[str], feeds: object) -> Iterator[Mapping[str, Array]]:
        yield {name: values[name] for name in tensors if name in values}

    found = observed_limits(model, sites, list[Feed](), observe, dict.fromkeys(values, ("uint8",)))
    return found[sites[0].tensor]


def largest_sum(columns: np.ndarray, weights: np.ndarray) -> int:
    """The largest sum of two products as the kernel adds them, of inputs (row, column) and weights (output, column)."""
    products = columns.astype(np.int64)[:, None] * weights.astype(np.int64)[None]
    even = products.shape[-1] // 2 * 2
    return int(np.abs(products[..., 0:even:2] + products[..., 1:even:2]).max(initial=0))


def params_of(values: np.ndarray) -> QuantParams:
    """Those of uint8, as a kernel finds them at run time."""
    return activation_params(TensorRange(min(0.0, float(values.min())), max(0.0, float(values.max()))), UINT8)


def skewed(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Values of which few are large at once."""
    return (random.standard_normal(shape) ** 3).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), depth=st.integers(1, 70), per_channel=st.booleans())
def test_weights_of_a_product_do_not_overflow_with_any_input(
    seed: int, depth: int, *, per_channel: bool
) -> None:
    random = np.random.default_rng(seed)
    weight = skewed(random, depth, 5)
    any_input = PairMaxima.of_any_input(layer_of(linear_model("MatMul", weight, 2)))
    reduced = weight_params(weight, INT8, 1 if per_channel else None, reduce_range=True)
    full = weight_params(weight, INT8, 1 if per_channel else None)
    scale = any_input.scale(weight, reduced)
    assert scale.shape == reduced.scale.shape
    assert (scale <= reduced.scale).all()
    assert (scale >= full.scale * 0.999).all()
    integers = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    assert not any_input.overflowing(integers).any()
    for x in (np.full((3, depth), 255), random.choice([0, 255], (3, depth))):
        assert largest_sum(x, integers.T) <= MOST


@pytest.mark.parametrize(
    ("op", "weight", "axis"),
    [
        pytest.param("MatMul", np.array([[1], [-1], [0.5], [-0.9]]), 1, id="neighbours of opposite sign"),
        pytest.param("Conv", np.ones((4, 1, 3, 3)), 0, id="a depthwise kernel"),
    ],
)
def test_weights_that_cannot_overflow_have_8_bits(op: str, weight: np.ndarray, axis: int) -> None:
    weight = weight.astype(np.float32)
    layer = layer_of(linear_model(op, weight, weight.ndim, **({"group": 4} if op == "Conv" else {})))
    any_input = PairMaxima.of_any_input(layer)
    reduced = weight_params(weight, INT8, axis, reduce_range=True)
    scale = any_input.scale(weight, reduced)
    np.testing.assert_allclose(scale, 1 / 127, rtol=1e-6)
    assert not any_input.overflowing(np.rint(weight * 127)).any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), depth=st.integers(2, 40), per_channel=st.booleans())
def test_weights_of_a_product_do_not_overflow_on_data(seed: int, depth: int, *, per_channel: bool) -> None:
    random = np.random.default_rng(seed)
    weight, x = skewed(random, depth, 5), skewed(random, 2, 30, depth)
    limit = limits_of(linear_model("MatMul", weight, 3), {"x": x})
    reduced = weight_params(weight, INT8, 1 if per_channel else None, reduce_range=True)
    static = activation_params(TensorRange(float(x.min()), float(x.max())), UINT8)
    scale = limit.scale(weight, reduced, [static])
    assert scale.shape == reduced.scale.shape
    assert (scale <= reduced.scale).all()
    integers = np.clip(np.rint(weight / scale), -127, 127)
    for params in (static, params_of(x)):
        assert largest_sum(params.quantize(x).reshape(-1, depth), integers.T) <= MOST


@pytest.mark.parametrize(
    ("channels", "groups", "pads", "shift"), [(4, 1, 1, -2.0), (3, 1, 1, 0.0), (6, 2, 0, 2.0)]
)
def test_convolutions_do_not_overflow_on_data(channels: int, groups: int, pads: int, shift: float) -> None:
    random = np.random.default_rng(1)
    weight = skewed(random, 8, channels // groups, 3, 3)
    x = skewed(random, 2, channels, 9, 9) + np.float32(shift)
    model = linear_model("Conv", weight, 4, group=groups, pads=[pads] * 4)
    limit = limits_of(model, {"x": x})
    reduced = weight_params(weight, INT8, 0, reduce_range=True)
    params = params_of(x)
    scale = limit.scale(weight, reduced, [params])
    integers = np.clip(np.rint(weight / scale.reshape(-1, 1, 1, 1)), -127, 127)
    padded = np.pad(x, [(0, 0), (0, 0), (pads, pads), (pads, pads)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    by_group = windows.reshape(2, groups, -1, *windows.shape[2:4], 9)  # sample to kernel
    columns = by_group.transpose(1, 0, 3, 4, 5, 2).reshape(groups, -1, 9 * channels // groups)
    rows = limit.layer.matrix(integers)
    assert all(largest_sum(params.quantize(columns[n]), rows[n]) <= MOST for n in range(groups))


LSTM = """g (float[5, 2, 6] x) => (float[5, 2, 2, 4] y) {
  [n] y = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r) }"""


def test_weights_of_an_lstm_are_limited_by_its_input_and_its_hidden_states() -> None:
    random = np.random.default_rng(0)
    model = parsed(LSTM, w=skewed(random, 2, 16, 6), r=skewed(random, 2, 16, 4))
    hidden = Site(tensor="r", consumers=(Consumer("n", 2),), format="int8", axis=0, weight=True)
    sites = [replace(SITE, axis=0), hidden]
    assert find_layers(model, sites)["r"].source == "y"
    x, y = skewed(random, 5, 2, 6), np.tanh(skewed(random, 5, 2, 2, 4))
    # Values that are quantized together, (direction, row, column).
    runs = {"w": [np.stack([x.reshape(-1, 6)] * 2)], "r": list(y)}
    for site in sites:
        limit, weight = limits_of(model, {"x": x, "y": y}, [site]), model.array(site.tensor)
        scale = limit.scale(weight, weight_params(weight, INT8, 0, reduce_range=True), [])
        assert scale.shape == (2,)
        integers = np.clip(np.rint(weight / scale.reshape(2, 1, 1)), -127, 127)
        for run in runs[site.tensor]:
            for values, own in zip(run, integers, strict=True):
                assert largest_sum(params_of(run).quantize(values), own) <= MOST


BITS = QuantizeRules(corrections=("bits",))


@pytest.mark.usefixtures("saturates")
def test_weights_have_8_bits_where_data_permits_it(session: Session, models: Path, tmp_path: Path) -> None:
    work = session.work(digits_case(models, tmp_path, 8, quantize=BITS)).prepared
    sites = work.space.resolve(work.space.everything()).ordered
    weights = [site for site in sites if site.weight and site.format == "int8"]
    assert max(np.abs(work.numbers.integer_weight(site).astype(int)).max() for site in weights) > 100
    (note,) = (text for text in work.warnings if "could overflow on this processor" in text)
    assert "with a margin of 10%" in note


@pytest.mark.usefixtures("saturates")
def test_scales_of_a_start_are_kept_where_data_permits(
    session: Session, models: Path, tmp_path: Path
) -> None:
    start = (Path(__file__).parents[2] / "data" / "qdq_ort_u8s8_digits_resnet_b1.onnx",)
    case = digits_case(models, tmp_path, 8, quantize=BITS, tune=TuneRules(start_from=start))
    by_data, by_proof = (session.work(each).prepared for each in (case, replace(case, inputs=Inputs())))
    assert by_data.start_scales.weights.keys() == by_proof.start_scales.weights.keys()
    kept = [work.calibrated[1].corrections.weights for work in (by_data, by_proof)]
    assert len(kept[0]) > len(kept[1])
