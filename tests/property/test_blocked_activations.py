"""Blocked activations in NVFP4 and MXFP8: arithmetic compared with ml_dtypes, and insert, import and strip."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from onnx_text import parsed
from random_models import MODES, bytes_of

from qdqspec.graph.definition import evaluator_of
from qdqspec.graph.model import Model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.formats import FORMATS
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scales import REALS
from qdqspec.qdq.scheme_file import SchemeNumbers
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site
from tests.support.weights import floating

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


def linear(
    op_type: str,
    values: Array,
    weight: Array,
    *,
    transposed: bool = False,
    opset: int = 21,
    bias: bool = False,
) -> Model:
    """A model of one linear operator."""
    kind = {"float32": "float", "float64": "double"}.get(str(values.dtype), str(values.dtype))
    ends = [",".join(map(str, (*values.shape[:-1], size))) for size in (values.shape[-1], weight.shape[1])]
    turned, third = "<transB = 1>" if transposed else "", ", b" if bias else ""
    constants = {"w": weight.T.copy() if transposed else weight} | (
        {"b": np.ones(weight.shape[1])} if bias else {}
    )
    text = (
        f"g ({kind}[{ends[0]}] x) => ({kind}[{ends[1]}] y) {{ [linear] y = {op_type}{turned}(x, w{third}) }}"
    )
    return parsed(text, opset, ir=10, **{n: value.astype(values.dtype) for n, value in constants.items()})


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
