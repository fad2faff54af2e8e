"""The tensors, nodes and labels of units, and the reasons why others are not offered for quantization."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec._core.registry import resolve
from qdqspec.backends.base import Capabilities
from qdqspec.backends.onnxruntime import backend
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import tie_ranges
from qdqspec.qdq.search_space import NOT_ASKED, SchemeSpace, judge
from qdqspec.types import Consumer, Label, QuantizeRules

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


# ---- the reasons that `inspect` prints, each with a model that has it ------------------------------------


def model_of(text: str, **constants: object) -> Model:
    return named_model(text, w=(4, 4, 1, 1), **constants)


def reasons(model: Model, can: Capabilities = CAPABILITIES, **rules: bool) -> dict[str, str]:
    return dict(judge(model, can, backend="any", rules=QuantizeRules(**rules)).reasons)


SHAPED = f"({IMAGE} x) => ({IMAGE} y)"
CHOICE = f"({IMAGE} x, bool c) => ({IMAGE} y)"
BRANCHES = f"""then_branch = t () => ({IMAGE} u) {{ u = Neg(z) }},
               else_branch = e () => ({IMAGE} v) {{ v = Abs(x) }}"""
TYPED = "Add: no floating point input of 16 or 32 bits"
SCALED = "Add: one of its constants is empty, infinite or not a number, so that it has no scale"
REASONS = [
    (f"({IMAGE} x) => (float[4] y, {IMAGE} z)", "s = Shape(x) f = Cast<to = 1>(s) y = Mul(f, f) z = Neg(x)", "y",
     "computed from shapes or constants alone"),
    (SHAPED, "y = mine.Conv(x, w)", "y", "mine:Conv: an operator that the backend does not know"),
    (SHAPED, "y = Tanh(x)", "y", "Tanh: the backend runs it in floating point only"),
    (f"({IMAGE} x) => (double[1,4,6,6] y)", "y = Cast<to = 11>(x)", "y", "Cast: never quantized by itself"),
    (SHAPED, "a = Conv(x, w) b = Relu(a) y = Neg(b)", "b", "Relu: quantized together with the operator before it"),
    ("(int64[4] x) => (int64[4] y)", "y = Add(x, x)", "y", TYPED),
    ("(double[4] x) => (double[4] y)", "y = Add(x, x)", "y", TYPED),
    ("(float[4] x) => (y)", "a = mine.Odd(x) b = Reshape(a, x) y = Neg(b)", "b", "Reshape: element type not known"),
    (f"({IMAGE} x, float[4,4,1,1] v) => ({IMAGE} y)", "a = Conv(x, v) y = Neg(a)", "a",
     "Conv: its weight is computed, and integer kernels need a constant one"),
    (f"{SHAPED} <float[0] none = {{}}>", "a = Add(x, none) y = Neg(a)", "a", SCALED),
    (SHAPED, "a = Conv(x, w) y = Neg(x)", "a", "Conv: no node reads its output"),
    ("(float[1] x, float[4] v) => (float[4] y)", "a = Add(x, x) y = Clip(v, a)", "a",
     "Add: its output is read as a bound, a scale or a shape"),
    (f"({IMAGE} x, int64 at, int64 by) => (int64[n] y, {IMAGE} z)",
     "a = Conv(x, w) b = ReduceMax<keepdims = 0>(a) c = Cast<to = 7>(b) y = Range(at, c, by) z = Neg(a)", "a",
     "its values set the size of a tensor, which quantization would change"),
    (CHOICE, f"a = Conv(x, w) z = Relu(a) y = If (c) <{BRANCHES}>", "a",
     "Conv: a body of If, Loop or Scan reads its output"),
    (CHOICE, f"z = Neg(x) y = If (c) <{BRANCHES}>", "y",
     "If: control flow; the nodes of its bodies count by themselves"),
    (SHAPED, "y = Sigmoid(x)", "y", f"Sigmoid: it makes a graph output, and {NOT_ASKED}"),
]  # fmt: skip


@pytest.mark.parametrize(("ports", "nodes", "node", "reason"), REASONS)
def test_the_reason_why_a_node_is_not_offered(ports: str, nodes: str, node: str, reason: str) -> None:
    assert reasons(model_of(f"g {ports} {{ {nodes} }}"))[node] == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"g ({IMAGE} y) => ({IMAGE} y, {IMAGE} z) {{ z = Neg(y) }}", "no node computes it"),
        (f"g ({IMAGE} x) => (int64[4] y) {{ y = Shape(x) }}", "it holds INT64"),
        (
            f"g ({IMAGE} x) => ({IMAGE} y) {{ y = Tanh(x) }}",
            "Tanh: the backend runs it in floating point only",
        ),
        (f"g ({IMAGE} x) => ({IMAGE} y) {{ a = Conv(x, w) y = Relu(a) }}", ""),
        (f"g ({IMAGE} x) => ({IMAGE} y) {{ a = Mul(x, x) y = Relu(a) }}", NOT_ASKED),
    ],
    ids=["input", "integers", "float operator", "function after a convolution", "function"],
)
def test_the_reason_why_a_graph_output_is_not_offered(text: str, reason: str) -> None:
    assert judge(model_of(text), CAPABILITIES, backend="any").outputs["y"] == reason


def test_judging_folds_batch_normalization_as_tuning_does() -> None:
    """Unnamed nodes are matched although folding changes their numbers."""
    model = model_of(
        f"""g ({IMAGE} x) => ({IMAGE} y) {{ a = Conv(x, w) b = BatchNormalization(a, s, s, s, s)
            c = Conv(b, w) y = Tanh(c) }}""",
        s=np.ones(4, np.float32),
    )
    for node in model.proto.graph.node:
        node.name = ""
    assert reasons(Model(model.proto)) == {
        "Conv#0": "",
        "BatchNormalization#1": "BatchNormalization: folded into the operator before it",
        "Conv#2": "",
        "Tanh#3": "Tanh: the backend runs it in floating point only",
    }


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "trtexec", "fake"])
def test_judging_needs_no_installed_backend(backend: str, models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    found = judge(model, resolve("backend", backend)().capabilities(), backend=backend)
    assert found.reasons["/layer2/layer2.0/conv2/Conv"] == ""
    small = backend in ("tensorrt", "trtexec")  # ten columns, one for each class
    assert found.outputs == {"logits": "Gemm: rule small-gemm leaves it in float" if small else NOT_ASKED}


def test_a_product_of_two_activations_is_not_offered_where_the_weight_must_be_constant() -> None:
    model = model_of(
        "g (float[4,4] x) => (float[4,4] y) <float[4,4] v = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}> "
        "{ a = MatMul(x, v) y = MatMul(a, a) }"
    )
    can = replace(CAPABILITIES, constant_weight=frozenset({"MatMul"}))
    assert reasons(model)["y"] == ""
    assert reasons(model, can) == {
        "a": "",
        "y": "MatMul: its weight is computed, and integer kernels need a constant one",
    }
