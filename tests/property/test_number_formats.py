"""Every number format compared with ONNX's reference implementation, and in placements of random models."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from qdqspec.graph.definition import evaluator_of
from qdqspec.graph.model import Model
from qdqspec.qdq.formats import BIAS_FORMAT, BLOCK_SIZES, FORMATS
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scales import REALS, dequantize, quantize, weight_params
from qdqspec.types import Consumer, Placement, Site
from tests.support.weights import floating

STORED = [name for name, fmt in FORMATS.items() if name != BIAS_FORMAT and not fmt.at_run_time]
formats = st.sampled_from([FORMATS[name] for name in STORED])
weights = hnp.arrays(
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
@given(values=weights, axis=st.integers(0, 1))
def test_the_rounding_error_of_weights_is_within_the_precision_of_the_format(name, values, axis) -> None:
    params = weight_params(values, FORMATS[name], axis)
    error = np.abs(dequantize(quantize(values, params), params) - values)
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
    formats, weights, st.integers(0, 1), st.sampled_from(("integer", "float")), st.sampled_from(list(REALS))
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
    ours = dequantize(numbers.integer_weight(site), numbers.params(site))
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
