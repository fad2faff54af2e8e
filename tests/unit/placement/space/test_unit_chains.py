"""The nodes and tensors of a unit: following activations, int32 biases, shared constants."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import tie_ranges
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Label

CAPABILITIES = backend().capabilities()


def model_of(text: str, **weights: tuple[int, ...]) -> Model:
    return parsed(text, named=True, **weights)


def space_of(model: Model, **more) -> SchemeSpace:
    return SchemeSpace(model, CAPABILITIES, **more)


def worst_error(model: Model, label: Label) -> float:
    """The largest error of an output with one label for all units, relative to the largest value of the float model."""
    space = space_of(model)
    numbers = Quantizer(model, tie_ranges(model, ranges_for(model)), biases=space.bias_sources)
    inserted = insert_qdq(model, space.resolve(space.uniform(label)), numbers).proto
    onnx.checker.check_model(inserted, full_check=True)
    random = np.random.default_rng(1)
    feeds = {name: random.uniform(-1, 1, v.shape).astype(v.dtype) for name, v in random_inputs(model).items()}
    pairs = zip(outputs_of(inserted, feeds, "ENABLE_ALL"), outputs_of(model, feeds), strict=True)
    return max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)


def test_a_unit_includes_the_only_reader_if_it_is_an_activation() -> None:
    text = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { c = Conv(x, w)\n r = Relu(c)\n y = Conv(r, v) }"
    space = space_of(model_of(text, w=(4, 4, 1, 1), v=(4, 4, 1, 1)))
    assert space.by_id["c"].nodes == ("c", "r")
    assert space.by_id["c"].outputs == ("r",)
    assert {site.tensor for site in space.resolve({"c": "in+out"}).sites} == {"x", "w", "r"}


def test_all_operands_of_a_concat_are_quantized_constants_too() -> None:
    text = """g (float[1,4,6,6] x) => (float[1,4,6,6] y)
    { a = Relu(x)\n k = Concat<axis=1>(x, a, c)\n y = Conv(k, w) }"""
    space = space_of(model_of(text, c=(1, 2, 6, 6), w=(4, 10, 1, 1)))
    sites = {site.tensor: site for site in space.resolve({"k": "in+out"}).sites}
    assert set(sites) == {"x", "a", "c", "k"}
    assert sites["c"].weight
    assert sites["c"].format == sites["x"].format == "uint8"
    assert sites["c"].axis is None


def test_a_condition_computed_from_shapes_does_not_exclude_the_results_of_the_bodies() -> None:
    text = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) <int64[1] most = {100}> {
      s = Size(x)
      less = Less(s, most)
      i = If (less) <
        then_branch = then () => (float[1,4,6,6] p) { p = Neg(x) },
        else_branch = other () => (float[1,4,6,6] q) { q = Relu(x) }
      >
      c = Conv(i, w)
      y = Neg(c)
    }"""
    assert [unit.id for unit in space_of(model_of(text, w=(4, 4, 1, 1))).units] == ["c"]


GEMM = "g (float[3,8] x) => (float[3,5] y) { y = Gemm(x, w, b) }"


def test_a_bias_is_int32_where_the_output_stays_float() -> None:
    space = space_of(model_of(GEMM, w=(8, 5), b=(5,)))
    sites = {site.tensor: site for site in space.resolve({"y": "in-only"}).sites}
    assert {name: site.format for name, site in sites.items()} == {"x": "uint8", "w": "int8", "b": "int32"}
    assert (sites["w"].axis, sites["b"].axis) == (1, 0)
    activation, weight = space.bias_sources[Consumer("y", 2)]
    assert (activation.tensor, weight.tensor) == ("x", "w")


@pytest.mark.parametrize("shape", [(1,), (3, 5), (3, 1), ()])
def test_a_bias_of_another_broadcast_is_not_offered_with_a_float_output(shape: tuple[int, ...]) -> None:
    space = space_of(model_of(GEMM, w=(8, 5), b=shape))
    assert all("in-only" not in unit.labels for unit in space.units)


def test_an_add_of_a_constant_after_a_matmul_is_its_bias() -> None:
    for operands in ("m, b", "b, m"):
        text = f"g (float[3,8] x) => (float[3,5] y) {{ m = MatMul(x, w)\n y = Add({operands}) }}"
        space = space_of(model_of(text, w=(8, 5), b=(5,)))
        assert space.by_id["m"].nodes == ("m", "y")
        formats = {site.tensor: site.format for site in space.resolve({"m": "in-only"}).sites}
        assert formats == {"x": "uint8", "w": "int8", "b": "int32"}


def test_a_bias_that_two_products_share_is_quantized_for_each() -> None:
    """The scale of a bias is the product of input and weight scale, which differ between products."""
    text = "g (float[3,8] x, float[3,8] z) => (float[3,5] y, float[3,5] u) { y = Gemm(x, w, b)\n u = Gemm(z, v, b) }"
    model = model_of(text, w=(8, 5), v=(8, 5), b=(5,))
    space = space_of(model)
    sites = [site for site in space.resolve(space.uniform("in-only")).sites if site.tensor == "b"]
    assert sorted(site.consumers for site in sites) == [(Consumer("u", 2),), (Consumer("y", 2),)]
    assert worst_error(model, "in-only") < 0.05


def test_a_shared_weight_is_one_site_if_the_channel_axes_agree() -> None:
    text = "g (float[3,5] x) => (float[3,5] y) { a = Gemm(x, w)\n b = Gemm(a, w)\n y = Gemm<transB=1>(b, w) }"
    space = space_of(model_of(text, w=(5, 5)))
    sites = [site for site in space.resolve(space.uniform("in-only")).sites if site.tensor == "w"]
    assert {(site.axis, len(site.consumers)) for site in sites} == {(1, 2), (0, 1)}
    per_tensor = space_of(model_of(text, w=(5, 5)), rules=space.rules.__class__(weights="per-tensor"))
    (site,) = [s for s in per_tensor.resolve(per_tensor.uniform("in-only")).sites if s.tensor == "w"]
    assert len(site.consumers) == 3


@pytest.mark.parametrize(
    "text",
    [
        GEMM,
        GEMM.replace("Gemm(", "Gemm<alpha=0.5>("),
        GEMM.replace("Gemm(", "Gemm<beta=0.25>("),
        GEMM.replace("Gemm(", "Gemm<alpha=2.0, beta=3.0>("),
        "g (float[3,8] x) => (float[3,5] y) { m = MatMul(x, w)\n y = Add(b, m) }",
        "g (float[3,8] x) => (float[3,5] y) { m = MatMul(x, w)\n a = Add(m, b)\n y = Relu(a) }",
    ],
)
def test_products_with_int32_biases_are_close_to_the_float_model(text: str) -> None:
    """ONNX Runtime ignores the scale of a bias, so it must be the product of input and weight scale."""
    assert worst_error(model_of(text, w=(8, 5), b=(5,)), "in-only") < 0.05
