"""Properties of quantization for any numbers, compared with ONNX's reference implementation."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from qdqspec.qdq.calibrate import Histogram, entropy_range, mse_range, percentile_range
from qdqspec.qdq.formats import FORMATS, NumberFormat, QuantParams
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scales import activation_params, dequantize, quantize, weight_params

reals = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
# int32 is for biases: QuantizeLinear does not output it, and float32 cannot represent all its steps.
formats = st.sampled_from([FORMATS[name] for name in ("int8", "uint8", "int16", "uint16")])
spans = st.tuples(reals, reals).map(lambda ends: TensorRange(min(ends), max(ends)))
weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=4, max_side=5),
    elements=st.floats(-100, 100, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0),
)


@given(spans, formats, st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_rounding_error_within_the_range_is_at_most_half_a_step(span, fmt, symmetric, shares) -> None:
    params = activation_params(span, fmt, symmetric=symmetric)
    values = np.array([span.low + share * (span.high - span.low) for share in shares], np.float32)
    error = np.abs(dequantize(quantize(values, params), params) - values)
    # Additional to half a step: rounding of float32 quotients, products, and of the scale.
    slack = np.float32(fmt.high - fmt.low) * params.scale * np.finfo(np.float32).eps * 4
    assert (error <= params.scale / 2 + slack).all()


@given(spans, formats, st.booleans())
def test_zero_maps_exactly_to_the_zero_point(span: TensorRange, fmt: NumberFormat, symmetric: bool) -> None:
    params = activation_params(span, fmt, symmetric=symmetric)
    zero = quantize(np.zeros(1, np.float32), params)
    assert zero == params.zero_point
    assert dequantize(zero, params) == 0


@given(weights, st.data(), formats, st.booleans())
def test_per_channel_equals_per_slice(weight, data, fmt, reduce_range) -> None:
    axis = data.draw(st.integers(-weight.ndim, weight.ndim - 1))
    whole = weight_params(weight, fmt, axis, reduce_range=reduce_range)
    integers = quantize(weight, whole)
    assert whole.axis == axis % weight.ndim
    least = whole.scale.max() * 2.0**-16  # lower bound for channels of very small values
    for channel in range(weight.shape[axis]):
        part = np.take(weight, channel, axis)
        alone = weight_params(part, fmt, None, reduce_range=reduce_range)
        if part.any() and alone.scale > least:
            assert whole.scale[channel] == alone.scale
            np.testing.assert_array_equal(np.take(integers, channel, axis), quantize(part, alone))
        elif weight.any():
            assert whole.scale[channel] == pytest.approx(least)


@given(weights, st.booleans())
def test_weights_use_their_whole_range_symmetrically(weight: np.ndarray, reduce_range: bool) -> None:
    integers = quantize(weight, weight_params(weight, FORMATS["int8"], 0, reduce_range=reduce_range))
    largest = np.abs(integers.astype(int)).reshape(len(weight), -1).max(axis=1)
    peaks = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    regular = (peaks > 0) & (peaks > peaks.max() * 2.0**-16)
    assert (largest[regular] == (63 if reduce_range else 127)).all()


@given(weights, st.data(), formats)
def test_integers_are_those_of_onnx_quantizelinear(weight, data, fmt) -> None:
    axis = data.draw(st.none() | st.integers(0, weight.ndim - 1))
    params = weight_params(weight, fmt, axis)
    coarse = QuantParams(
        fmt, params.scale * np.float32(0.5), params.zero_point, axis
    )  # half of the values saturate
    for chosen in (params, coarse):
        integers, reals_back = _reference(weight, chosen)
        np.testing.assert_array_equal(quantize(weight, chosen), integers)
        np.testing.assert_array_equal(dequantize(integers, chosen), reals_back)


@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-50, 50, width=32, allow_subnormal=False)),
    st.sampled_from([percentile_range, entropy_range, mse_range]),
)
def test_clipped_ranges_are_within_the_observed_range(values: np.ndarray, choose: object) -> None:
    span = TensorRange(float(values.min()), float(values.max()))
    assume(span.largest > 1e-30)
    histogram = Histogram(span)
    histogram.add(values)
    chosen = choose(histogram)
    assert span.low <= chosen.low <= 0 <= chosen.high <= span.high
    assert chosen.low < chosen.high


def _reference(values: np.ndarray, params: QuantParams) -> tuple[np.ndarray, np.ndarray]:
    kind = onnx.TensorProto.DataType.Name(params.format.elem_type).lower()
    axis = "" if params.axis is None else f"<axis = {params.axis}>"
    model = parsed(
        f"""g (float x, float s, {kind} z) => ({kind} q, float y) {{
            q = QuantizeLinear{axis}(x, s, z)  y = DequantizeLinear{axis}(q, s, z) }}""",
        21,
    )
    feeds = {"x": values, "s": params.scale, "z": params.zero_point}
    return tuple(ReferenceEvaluator(model.proto).run(None, feeds))


@pytest.mark.parametrize(("low", "high"), [(0.0, float("nan")), (float("-inf"), 0.0), (2.0, 1.0)])
def test_an_invalid_range_is_an_error(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="not a range"):
        TensorRange(low, high)
