"""Properties of quantization in every number format, compared with ONNX's reference implementation and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator
from onnx_text import linear, parsed
from random_models import MODES, bytes_of, floating

from qdqspec.graph.definition import evaluator_of
from qdqspec.graph.model import Model
from qdqspec.qdq.calibrate import Histogram, entropy_range, mse_range, percentile_range
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.formats import BIAS_FORMAT, BLOCK_SIZES, FORMATS, NumberFormat, QuantParams
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.match import SchemeNumbers
from qdqspec.qdq.quantizer import REALS, Quantizer, activation_params, weight_params
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

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
    error = np.abs(params.dequantize(params.quantize(values)) - values)
    # Additional to half a step: rounding of float32 quotients, products, and of the scale.
    slack = np.float32(fmt.high - fmt.low) * params.scale * np.finfo(np.float32).eps * 4
    assert (error <= params.scale / 2 + slack).all()


@given(spans, formats, st.booleans())
def test_zero_maps_exactly_to_the_zero_point(span: TensorRange, fmt: NumberFormat, symmetric: bool) -> None:
    params = activation_params(span, fmt, symmetric=symmetric)
    zero = params.quantize(np.zeros(1, np.float32))
    assert zero == params.zero_point
    assert params.dequantize(zero) == 0


@given(weights, st.data(), formats, st.booleans())
def test_per_channel_equals_per_slice(weight, data, fmt, reduce_range) -> None:
    axis = data.draw(st.integers(-weight.ndim, weight.ndim - 1))
    whole = weight_params(weight, fmt, axis, reduce_range=reduce_range)
    integers = whole.quantize(weight)
    assert whole.axis == axis % weight.ndim
    least = whole.scale.max() * 2.0**-16  # lower bound for channels of very small values
    for channel in range(weight.shape[axis]):
        part = np.take(weight, channel, axis)
        alone = weight_params(part, fmt, None, reduce_range=reduce_range)
        if part.any() and alone.scale > least:
            assert whole.scale[channel] == alone.scale
            np.testing.assert_array_equal(np.take(integers, channel, axis), alone.quantize(part))
        elif weight.any():
            assert whole.scale[channel] == pytest.approx(least)


@given(weights, st.booleans())
def test_weights_use_their_whole_range_symmetrically(weight: np.ndarray, reduce_range: bool) -> None:
    integers = weight_params(weight, FORMATS["int8"], 0, reduce_range=reduce_range).quantize(weight)
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
        np.testing.assert_array_equal(chosen.quantize(weight), integers)
        np.testing.assert_array_equal(chosen.dequantize(integers), reals_back)


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


# ---- every number format, and in models ----------------------------------------------------------


STORED = [name for name, fmt in FORMATS.items() if name != BIAS_FORMAT and not fmt.at_run_time]
stored_formats = st.sampled_from([FORMATS[name] for name in STORED])
matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 200), st.integers(1, 3)),
    elements=st.floats(-100, 100, width=32).map(lambda value: value if abs(value) > 1e-6 else 0.0),
)
# The largest error, relative to the largest value with the same scale.
COARSENESS = {
    "int8": 1 / 254, "uint8": 1 / 254, "int16": 1 / 65534, "uint16": 1 / 65534, "int4": 1 / 14, "uint4": 1 / 14,
    **{f"int8_b{size}": 1 / 254 for size in BLOCK_SIZES},
    "fp8": 1 / 28, "mxfp8": 1 / 14,  # half a step of 3 mantissa bits; mxfp8 rounds its scale up
    "nvfp4": 1 / 6 + 1 / 16,  # half of the step from 4 to 6, and the rounding of the 8-bit scale
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
@given(values=matrices, axis=st.integers(0, 1))
def test_the_rounding_error_of_weights_is_within_the_precision_of_the_format(name, values, axis) -> None:
    params = weight_params(values, FORMATS[name], axis)
    error = np.abs(params.dequantize(params.quantize(values)) - values)
    # The scale of a channel far below the others has a lower bound, and float32 represents quotients of 15 bits with an
    # error of up to 1/512 of a step.
    assert (error <= np.abs(values).max() * COARSENESS[name] * 1.005 + 1e-30).all()


def one_weight(values: np.ndarray) -> Model:
    """A graph that reads one constant. ONNX's reference has no DequantizeLinear of opsets below 19."""
    kind = {"float32": "float"}.get(str(values.dtype), str(values.dtype))
    shape = ",".join(map(str, values.shape))
    return parsed(
        f"g ({kind}[{shape}] x) => ({kind}[{shape}] y) {{ [add] y = Add(x, w) }}", 19, ir=9, w=values
    )


@given(
    stored_formats,
    matrices,
    st.integers(0, 1),
    st.sampled_from(("integer", "float")),
    st.sampled_from(list(REALS)),
)
def test_weights_are_dequantized_as_by_the_onnx_reference(fmt, values, axis, mode, elem_type) -> None:
    real = REALS[elem_type]
    assume(mode == "integer" or real == np.float32)  # in 16 bits a quotient may be rounded differently
    values = values.astype(real)
    model = one_weight(values)
    site = Site(tensor="w", consumers=(Consumer("add", 1),), format=fmt.name, axis=axis, weight=True)
    numbers = Quantizer(model, {})
    inserted = insert_qdq(
        model, Placement(sites=frozenset({site})), numbers, floating=floating({site}, mode)
    ).proto
    onnx.checker.check_model(inserted, full_check=True)
    ours = numbers.params(site).dequantize(numbers.integer_weight(site))
    tolerance = 0 if real == np.float32 else 3 * float(ml_dtypes.finfo(real).eps)
    least = float(ml_dtypes.finfo(real).smallest_normal)
    (found,) = evaluator_of(inserted).run(None, {"x": np.zeros_like(values)})  # the weight plus zero
    np.testing.assert_allclose(found.astype(np.float32), ours, rtol=tolerance, atol=least)
    read = {node.op_type: node for node in Model(inserted).nodes}["Add"]
    assert Model(inserted).elem_type(read.inputs[1]) == elem_type


@given(st.sampled_from([name for name in STORED if not FORMATS[name].block]), st.floats(0.01, 100))
def test_activations_are_clipped_to_their_range(name: str, largest: float) -> None:
    model = one_weight(np.zeros((2, 2), np.float32))
    site = Site(tensor="x", consumers=(Consumer("add", 0),), format=name)
    numbers = Quantizer(model, {"x": TensorRange(-largest, largest)})
    inserted = insert_qdq(model, Placement(sites=frozenset({site})), numbers).proto
    far = np.full((2, 2), 3 * largest, np.float32)  # larger values overflow in the reference
    (found,) = ReferenceEvaluator(inserted).run(None, {"x": far})
    np.testing.assert_allclose(found, largest, rtol=0.01)


# ---- blocked activations in NVFP4 and MXFP8: arithmetic compared with ml_dtypes; insert, import and strip


DYNAMIC = [name for name, fmt in FORMATS.items() if fmt.dynamic and fmt.block]
Array = np.ndarray
values_of = st.floats(-1e4, 1e4, width=32).map(lambda value: value if abs(value) > 1e-6 else 0.0)


def activations(block: int) -> st.SearchStrategy[Array]:
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda count: count * block))
    return hnp.arrays(np.float32, shapes, elements=values_of)


def nvfp4(values: Array, outer: np.float32) -> Array:
    """NVFP4 as TensorRT's documents define it, with the casts of ml_dtypes (round half to even)."""
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, 16)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    share = np.minimum(largest / np.float32(6) / outer, np.float32(448))
    step = share.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * outer
    grid = np.clip(blocks / np.where(step == 0, np.float32(1), step), -6, 6)
    return (grid.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * step).reshape(values.shape)


def mxfp8(values: Array) -> Array:
    """MXFP8; the scale of a block is the least power of two not below its largest value divided by 448."""
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, 32)
    ratio = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(448)
    mantissa, exponent = np.frexp(ratio)
    step = np.ldexp(np.float32(1), np.maximum(np.where(mantissa == 0.5, exponent - 1, exponent), -127))
    grid = (blocks / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (grid * step).reshape(values.shape)


def both_sides(model: Model, name: str, *, weight: bool = True) -> Placement:
    rank = len(model.shape("x") or ())
    axis = 1 if model.nodes[-1].attributes.get("transB", 0) else 0
    sites = {Site(tensor="x", consumers=(Consumer("linear", 0),), format=name, axis=rank - 1)}
    if weight:
        sites.add(Site(tensor="w", consumers=(Consumer("linear", 1),), format=name, axis=axis, weight=True))
    return Placement(sites=frozenset(sites))


def read_back(name: str, values: Array, largest: float) -> Array:
    """The quantized activation, read by a product with the identity."""
    model = linear("MatMul", values, np.eye(values.shape[-1], dtype=np.float32))
    numbers = Quantizer(model, {"x": TensorRange(-largest, largest)})
    inserted = insert_qdq(model, both_sides(model, name, weight=False), numbers).proto
    (found,) = evaluator_of(inserted).run(None, {"x": values})
    return np.asarray(found, np.float32)


@given(activations(16), st.floats(0.0078125, 1e4, width=32))
def test_nvfp4_equals_the_formula_with_ml_dtypes(values: Array, largest: float) -> None:
    outer = np.float32(np.float64(largest) / 6 / 448)
    np.testing.assert_array_equal(read_back("nvfp4", values, largest), nvfp4(values, outer))


@given(activations(32))
def test_mxfp8_equals_the_formula_with_ml_dtypes(values: Array) -> None:
    np.testing.assert_array_equal(read_back("mxfp8", values, 1.0), mxfp8(values))


@st.composite
def linears(draw: st.DrawFn) -> tuple[str, Model]:
    name = draw(st.sampled_from(DYNAMIC))
    block = FORMATS[name].block
    op_type = draw(st.sampled_from(("MatMul", "Gemm")))
    lead = [2] if op_type == "Gemm" else draw(st.sampled_from(([2], [2, 3])))
    inner = block * draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = REALS[draw(st.sampled_from(list(REALS)))]
    values = random.normal(size=(*lead, inner)).astype(dtype)
    weight = random.normal(size=(inner, draw(st.sampled_from((8, 16))))).astype(np.float32)
    gemm = op_type == "Gemm"
    opset = draw(st.sampled_from((13, 19, 21, 23) if dtype == np.float32 else (19, 21, 23)))
    transposed, bias = gemm and draw(st.booleans()), gemm and draw(st.booleans())
    return name, linear(op_type, values, weight, transposed=transposed, opset=opset, bias=bias)


@given(linears(), MODES)
def test_import_and_strip_invert_blocked_pairs_of_a_linear_layer(drawn, weights) -> None:
    name, model = drawn
    placement = both_sides(model, name)
    numbers = Quantizer(model, {"x": TensorRange(-4.0, 4.0)})
    inserted = insert_qdq(model, placement, numbers, floating=floating(placement.sites, weights)).proto
    onnx.checker.check_model(inserted, full_check=True)
    quantized = Model(inserted)
    # Operators beside the pairs read the same types and shapes.
    for mine, its in zip(quantized.by_name["linear"].inputs, model.by_name["linear"].inputs, strict=True):
        assert quantized.elem_type(mine) == model.elem_type(its)
        assert quantized.shape(mine) == model.shape(its)
    assert [f for f in lint_model(quantized, "tensorrt-11") if f.severity == "refused"] == []
    assert {f.id for f in lint_model(quantized, "onnxruntime-cpu")} >= {"ORT007"}
    # Activation and weight have one pair each, with its scales.
    imported = import_placement(quantized)
    assert (imported.placement, imported.notes) == (placement, ())
    again = insert_qdq(
        model, placement, SchemeNumbers(model, imported.pairs), floating=floating(placement.sites, weights)
    )
    assert bytes_of(again.proto) == bytes_of(inserted)
    assert diff_models(quantized, Model(again.proto)).same
    stripped = strip_qdq(quantized, model).proto
    assert bytes_of(stripped) == bytes_of(model.proto)
    if weights == "float" and quantized.opset == model.opset:
        assert bytes_of(strip_qdq(quantized).proto) == bytes_of(model.proto)
