"""Activations in NVFP4 and MXFP8: the tensors they fit, and models of other tools."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_text import parsed
from written_cases import normal

from qdqspec.backends.base import Capabilities
from qdqspec.graph.definition import evaluator_of
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.pairs import misfit
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, QuantizeRules, Site

BOTH = ("in+out", "in-only")


def model_of(text: str, **constants: np.ndarray) -> Model:
    model = parsed(f"g {text}", 23, ir=11, **constants)
    for node in model.proto.graph.node:
        node.name = f"/{node.output[0]}"
    onnx.checker.check_model(model.proto, full_check=True)
    return Model(model.proto)


def exported(name: str) -> Model:
    """A linear layer as NVIDIA's Model-Optimizer exports it: blocks along the last axis, then a Transpose."""
    weight = normal(8, 64)
    if name == "nvfp4":
        pairs = """
          w_scale = DequantizeLinear(w_f8_scale, w_f32_scale)
          w_back = DequantizeLinear<axis=-1, block_size=16>(w_f4, w_scale)
          x_f4, x_f8 = trt.TRT_FP4DynamicQuantize<axis=-1, block_size=16, scale_type=17>(x, x_scale)
          x_scales = DequantizeLinear(x_f8, x_scale)
          x_back = DequantizeLinear<axis=-1, block_size=16>(x_f4, x_scales)"""
        numbers = {
            "w_f4": weight.astype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT4E2M1)),
            "w_f8_scale": np.ones((8, 4), helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)),
            "w_f32_scale": np.array(0.5, np.float32),
            "x_scale": np.array(0.002, np.float32),
        }
    else:
        pairs = """
          w_back = trt.TRT_MXFP8DequantizeLinear<axis=-1, block_size=32, output_dtype=1>(w_f8, w_exponent)
          x_f8, x_exponent = trt.TRT_MXFP8DynamicQuantize<axis=-1, block_size=32, output_dtype=17>(x)
          x_back = trt.TRT_MXFP8DequantizeLinear<axis=-1, block_size=32, output_dtype=1>(x_f8, x_exponent)"""
        numbers = {
            "w_f8": weight.astype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)),
            "w_exponent": np.full((8, 2), 125, np.uint8),
        }
    layer = "w_turned = Transpose(w_back)  y = MatMul(x_back, w_turned)"
    return model_of(f"(float[2,3,64] x) => (float[2,3,8] y) {{ {pairs}  {layer} }}", **numbers)


@pytest.mark.parametrize(("name", "worth"), [("nvfp4", 0.5), ("mxfp8", 0.25)])
def test_pairs_of_model_optimizer_are_imported_and_stripped(name: str, worth: float) -> None:
    model = exported(name)
    assert fold_constants(model).model is model  # folding keeps these pairs
    imported = import_placement(model)
    found = {pair.site.tensor: pair for pair in imported.pairs}
    assert imported.notes == ()
    assert found["x"].site == Site(tensor="x", consumers=(Consumer("/y", 0),), format=name, axis=2)
    weight = found.pop(next(t for t in found if t != "x"))
    assert (weight.site.format, weight.site.axis, weight.site.weight) == (name, 1, True)
    assert {scale * (weight.outer or 1.0) for scale in weight.scale} == {worth}
    assert found["x"].outer == (pytest.approx(0.002) if name == "nvfp4" else None)
    stripped = strip_qdq(model).proto
    assert [node.op_type for node in stripped.graph.node] == ["Transpose", "MatMul"]
    assert [opset.domain for opset in stripped.opset_import] == [""]
    text = diff_models(model, Model(stripped)).text()
    assert name == "mxfp8" or "float4e2m1 in blocks of 16, scales found at run time, times 0.002" in text
    feeds = {"x": normal(2, 3, 64)}
    (float_y,), (narrow_y,) = (evaluator_of(m).run(None, feeds) for m in (stripped, model.proto))
    error = np.linalg.norm(narrow_y - float_y) / np.linalg.norm(float_y)
    assert 0 < error < {"nvfp4": 0.15, "mxfp8": 0.04}[name]


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_fp8_pairs_of_domain_trt_are_read_as_those_of_onnx(dtype: str) -> None:
    """As Model-Optimizer writes them for operator sets before 19: FP8 with one scale and no zero point."""
    weight = normal(8, 4).astype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN))
    kind = {"float": np.float32, "float16": np.float16}[dtype]
    text = """x_f8 = trt.TRT_FP8QuantizeLinear(x, xs)  x_back = trt.TRT_FP8DequantizeLinear(x_f8, xs)
              w_back = trt.TRT_FP8DequantizeLinear(w_f8, ws)  y = MatMul(x_back, w_back)"""
    numbers = {"xs": np.array(0.25, kind), "ws": np.array(0.5, kind), "w_f8": weight}
    model, plain = (
        model_of(f"({dtype}[2,8] x) => ({dtype}[2,4] y) {{ {each} }}", **numbers, **more)
        for each, more in (
            (text, {}),
            (
                text.replace("trt.TRT_FP8", "").replace("(x, xs)", "(x, xs, zero)"),
                {"zero": np.zeros((), weight.dtype)},
            ),
        )
    )
    imported = import_placement(model)
    assert imported.notes == ()
    assert imported.pairs == import_placement(plain).pairs
    assert {(pair.site.format, pair.scale) for pair in imported.pairs} == {("fp8", (0.25,)), ("fp8", (0.5,))}
    stripped = strip_qdq(model)
    assert stripped.proto.SerializeToString() == strip_qdq(plain).proto.SerializeToString()
    assert diff_models(model, plain).same
    feeds = {"x": normal(2, 8).astype(kind)}
    (mine,), (its,) = (evaluator_of(each.proto).run(None, feeds) for each in (model, plain))
    np.testing.assert_array_equal(mine, its)


def test_a_pair_with_a_computed_outer_scale_is_stripped_and_noted() -> None:
    proto = exported("nvfp4").proto
    (scale,) = (tensor for tensor in proto.graph.initializer if tensor.name == "x_scale")
    proto.graph.initializer.remove(scale)
    proto.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["x_scale"], keepdims=0))
    model = Model(proto)
    assert "x" not in {pair.site.tensor for pair in import_placement(model).pairs}
    assert not any(node.op_type.startswith("TRT") for node in strip_qdq(model).proto.graph.node)


@pytest.mark.parametrize(
    ("shape", "axis", "why"),
    [
        ("2,3,64", 2, None),
        ("N,64", 1, None),
        ("2,3,4,64", 3, "nvfp4 activations are quantized in 2 or 3 dimensions, and it has 4"),
        ("64", 0, "nvfp4 activations are quantized in 2 or 3 dimensions, and it has 1"),
        ("2,3,64", 1, "nvfp4 activations come in blocks along the last axis, not along 1"),
        ("2,24", 1, "nvfp4 comes in whole blocks of 16, and its last dimension is 24"),
        ("2,K", 1, "nvfp4 comes in whole blocks of 16, and its last dimension is not known"),
        ("2,64", None, "nvfp4 comes in blocks of 16, and the site names no axis for them"),
    ],
)
def test_the_misfit_of_a_blocked_activation_has_a_reason(
    shape: str, axis: int | None, why: str | None
) -> None:
    model = model_of(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}")
    site = Site(tensor="x", consumers=(Consumer("/y", 0),), format="nvfp4", axis=axis)
    assert misfit(model, site) == why


def space_of(model: Model, name: str) -> SchemeSpace:
    capabilities = Capabilities(
        formats=("int8", name),
        labels={"MatMul": BOTH, "Gemm": BOTH},
        activations={"int8": "int8", name: name},
        weights={"int8": "int8", name: name},
        blocked_axes={"MatMul": (0,), "Gemm": (0, 1)},
    )
    return SchemeSpace(model, capabilities, rules=QuantizeRules(format=name))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_linear_layer_is_offered_with_both_sides_in_blocks(name: str) -> None:
    model = model_of("(float[2,3,64] x) => (float[2,3,8] y) { y = MatMul(x, w) }", w=normal(64, 8))
    space = space_of(model, name)
    assert [unit.labels for unit in space.units] == [("fp", "in-only")]
    sites = {site.tensor: site for site in space.resolve(space.everything()).sites}
    assert (sites["x"].format, sites["x"].axis, sites["x"].weight) == (name, 2, False)
    assert (sites["w"].format, sites["w"].axis, sites["w"].weight) == (name, 0, True)
    assert space.tensors == {"x"}  # the second-level scale needs a calibrated range


@pytest.mark.parametrize(
    "text",
    [
        "(float[2,3,4,64] x) => (float[2,3,4,8] y) { y = MatMul(x, w) }",  # four dimensions
        "(float[64,2] x) => (float[2,8] y) { y = Gemm<transA=1>(x, w) }",  # products are summed over the first
        "(float[2,3,64] x, float[2,64,8] w2) => (float[2,3,8] y) { y = MatMul(x, w2) }",  # no weight
    ],
)
def test_layers_that_do_not_fit_blocks_are_not_offered(text: str) -> None:
    assert space_of(model_of(text, w=normal(64, 8)), "nvfp4").units == ()
