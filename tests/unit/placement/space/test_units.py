"""The tensors, nodes and labels of units, and tensors that are never offered for quantization."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.base import Capabilities
from qdqspec.backends.onnxruntime import backend
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import tie_ranges
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Consumer, Label

CAPABILITIES = backend().capabilities()
IMAGE = "float[1,4,6,6]"
# A size that is a sum of predicted lengths, as in models that make speech.
LENGTH = f"""g ({IMAGE} x, float[4] v) => (y, {IMAGE} z)
    <int64[1] one = {{1}}, int64 zero = {{0}}, int64 step = {{1}}> {{
    a = Conv(x, w) b = ReduceSum<keepdims = 0>(a) c = Ceil(b) k = Cast<to = 7>(c) n = Reshape(k, one)
    d = Conv(a, w) z = Sigmoid(d)"""
OFFERED = {
    "Expand": (f"{LENGTH} y = Expand(v, n) }}", "d", "ab"),
    "Range": (f"{LENGTH} y = Range(zero, k, step) }}", "d", "ab"),
    "Reshape": (f"{LENGTH} y = Reshape(v, n) }}", "d", "ab"),
    "Resize": (f"{LENGTH} y = Resize(v, , , n) }}", "d", "ab"),
    "a shape only": (
        f"""g ({IMAGE} x) => ({IMAGE} z) {{ a = Conv(x, w) s = Shape(a) b = Reshape(a, s) c = Conv(b, w)
        z = Sigmoid(c) }}""",
        "a",
        "s",
    ),
    "a size of a body": (
        f"""g ({IMAGE} x, bool c) => (y, {IMAGE} z) <int64 zero = {{0}}, int64 step = {{1}}> {{
        a = Conv(x, w) h = Conv(a, w)
        k = If (c) <then_branch = t () => (int64 p) {{ f = ReduceMax<keepdims = 0>(h) p = Cast<to = 7>(f) }},
                    else_branch = e () => (int64 q) {{ i = ReduceMin<keepdims = 0>(h) q = Cast<to = 7>(i) }}>
        y = Range(zero, k, step) d = Conv(x, w) z = Sigmoid(d) }}""",
        "d",
        "a",
    ),
    "a condition of shapes": (
        f"""g ({IMAGE} x) => ({IMAGE} y) <int64[1] most = {{100}}> {{ s = Size(x) c = Less(s, most)
        k = If (c) <then_branch = t () => ({IMAGE} p) {{ p = Neg(x) }},
                    else_branch = e () => ({IMAGE} q) {{ q = Relu(x) }}> d = Conv(k, w) y = Neg(d) }}""",
        "d",
        "sc",
    ),
}


@pytest.mark.parametrize("case", OFFERED)
def test_operators_whose_values_set_a_size_are_not_offered(case: str) -> None:
    text, inside, outside = OFFERED[case]
    offered = space_of(named_model(text, w=(4, 4, 1, 1))).by_id.keys()
    assert offered >= set(inside)
    assert offered.isdisjoint(outside)


@pytest.mark.parametrize(
    ("constant", "offered"),
    [
        (np.full((4, 4), -3, np.float32), True),
        (np.full((4, 4), -np.inf, np.float32), False),
        (np.array(np.nan, np.float32), False),
        (np.zeros((0, 4), np.float32), False),
    ],
    ids=["numbers", "infinite", "NaN", "no element"],
)
def test_constants_that_have_no_scale_are_not_offered(constant: np.ndarray, offered: bool) -> None:
    """An attention mask contains minus infinity; NaN and empty tensors have no range."""
    text = "g (float[4,4] x) => (float[N,4] y) { a = MatMul(x, x)  b = Add(a, m)  y = MatMul(b, x) }"
    assert ("b" in space_of(named_model(text, m=constant)).by_id) is offered


def test_denied_nodes_read_floating_point_and_their_neighbours_stay_quantizable() -> None:
    model = parsed(
        """net (float[1,4] x) => (float[1,4] p, float[1,4] y) {
            a = Gemm(x, w)  p = Softmax(a)  b = Gemm(a, w)  c = Gemm(b, w)  d = Softmax(c)  y = Softmax(d) }""",
        named=True,
        w=(4, 4),
    )
    capabilities = Capabilities(
        formats=("int8",),
        labels={"Gemm": ("in+out", "in-only"), "Softmax": ("in+out",)},
        activations={"int8": "uint8"},
        weights={"int8": "int8"},
    )
    space = SchemeSpace(model, capabilities, allowed=set("abc"), denied=set("pdy"))
    placement = space.resolve(space.everything())
    assert not {end.node for site in placement.sites for end in site.consumers} & set("pdy")
    assert space.by_id["a"].labels == ("fp", "in+out", "in-only")  # b reads it too
    assert space.by_id["c"].labels == ("fp", "in-only")  # only a Softmax does


def named_model(text: str, **weights: object) -> Model:
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
    space = space_of(named_model(text, w=(4, 4, 1, 1), v=(4, 4, 1, 1)))
    assert space.by_id["c"].nodes == ("c", "r")
    assert space.by_id["c"].outputs == ("r",)
    assert {site.tensor for site in space.resolve({"c": "in+out"}).sites} == {"x", "w", "r"}


def test_all_operands_of_a_concat_are_quantized_constants_too() -> None:
    text = """g (float[1,4,6,6] x) => (float[1,4,6,6] y)
    { a = Relu(x)\n k = Concat<axis=1>(x, a, c)\n y = Conv(k, w) }"""
    space = space_of(named_model(text, c=(1, 2, 6, 6), w=(4, 10, 1, 1)))
    sites = {site.tensor: site for site in space.resolve({"k": "in+out"}).sites}
    assert set(sites) == {"x", "a", "c", "k"}
    assert sites["c"].weight
    assert sites["c"].format == sites["x"].format == "uint8"
    assert sites["c"].axis is None


GEMM = "g (float[3,8] x) => (float[3,5] y) { y = Gemm(x, w, b) }"


def test_a_bias_is_int32_where_the_output_stays_float() -> None:
    space = space_of(named_model(GEMM, w=(8, 5), b=(5,)))
    sites = {site.tensor: site for site in space.resolve({"y": "in-only"}).sites}
    assert {name: site.format for name, site in sites.items()} == {"x": "uint8", "w": "int8", "b": "int32"}
    assert (sites["w"].axis, sites["b"].axis) == (1, 0)
    activation, weight = space.bias_sources[Consumer("y", 2)]
    assert (activation.tensor, weight.tensor) == ("x", "w")


@pytest.mark.parametrize("shape", [(1,), (3, 5), (3, 1), ()])
def test_a_bias_of_another_broadcast_is_not_offered_with_a_float_output(shape: tuple[int, ...]) -> None:
    space = space_of(named_model(GEMM, w=(8, 5), b=shape))
    assert all("in-only" not in unit.labels for unit in space.units)


def test_an_add_of_a_constant_after_a_matmul_is_its_bias() -> None:
    for operands in ("m, b", "b, m"):
        text = f"g (float[3,8] x) => (float[3,5] y) {{ m = MatMul(x, w)\n y = Add({operands}) }}"
        space = space_of(named_model(text, w=(8, 5), b=(5,)))
        assert space.by_id["m"].nodes == ("m", "y")
        formats = {site.tensor: site.format for site in space.resolve({"m": "in-only"}).sites}
        assert formats == {"x": "uint8", "w": "int8", "b": "int32"}


def test_a_bias_that_two_products_share_is_quantized_for_each() -> None:
    """The scale of a bias is the product of input and weight scale, which differ between products."""
    text = "g (float[3,8] x, float[3,8] z) => (float[3,5] y, float[3,5] u) { y = Gemm(x, w, b)\n u = Gemm(z, v, b) }"
    model = named_model(text, w=(8, 5), v=(8, 5), b=(5,))
    space = space_of(model)
    sites = [site for site in space.resolve(space.uniform("in-only")).sites if site.tensor == "b"]
    assert sorted(site.consumers for site in sites) == [(Consumer("u", 2),), (Consumer("y", 2),)]
    assert worst_error(model, "in-only") < 0.05


def test_a_shared_weight_is_one_site_if_the_channel_axes_agree() -> None:
    text = "g (float[3,5] x) => (float[3,5] y) { a = Gemm(x, w)\n b = Gemm(a, w)\n y = Gemm<transB=1>(b, w) }"
    space = space_of(named_model(text, w=(5, 5)))
    sites = [site for site in space.resolve(space.uniform("in-only")).sites if site.tensor == "w"]
    assert {(site.axis, len(site.consumers)) for site in sites} == {(1, 2), (0, 1)}
    per_tensor = space_of(named_model(text, w=(5, 5)), rules=space.rules.__class__(weights="per-tensor"))
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
    assert worst_error(named_model(text, w=(8, 5), b=(5,)), "in-only") < 0.05


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_resolving_is_independent_of_the_order_of_labels_and_earlier_calls(models: Path, name: str) -> None:
    model = load_model(models / f"{name}.onnx")
    used, lots = SchemeSpace(model, OnnxRuntime().capabilities()), random.Random(name)
    for _ in range(8):
        labels = {unit.id: lots.choice(unit.labels) for unit in used.units}
        shuffled = dict(lots.sample(list(labels.items()), len(labels)))
        fresh = SchemeSpace(model, OnnxRuntime().capabilities()).resolve(labels)
        again = used.resolve(shuffled)
        assert again == fresh
        assert again.digest == fresh.digest
        assert again.labels == fresh.labels


def test_an_unknown_unit_or_label_is_an_error_with_the_valid_ones(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), OnnxRuntime().capabilities())
    conv = next(unit for unit in space.units if unit.op_type == "Conv")
    with pytest.raises(PlacementError, match="is no unit that can be labelled") as unknown:
        space.resolve({conv.id + "x": "in+out"})
    assert f"did you mean '{conv.id}'" in str(unknown.value)
    with pytest.raises(PlacementError, match=r"cannot be 'in-only'(.|\n)*it can be fp, in\+out"):
        space.resolve({conv.id: "in-only"})
