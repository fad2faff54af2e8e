"""Which pairs each placement rule of TensorRT moves or omits, and the formats and labels of TensorRT for RTX."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from onnx_text import model_of

from qdqspec.backends.base import Capabilities
from qdqspec.backends.tensorrt.ops import RULES, capabilities as tensorrt_capabilities
from qdqspec.backends.tensorrt_rtx.ops import FORMATS as RTX_FORMATS, capabilities as rtx_capabilities
from qdqspec.graph.model import Model
from qdqspec.qdq.search_space import SchemeSpace, judge
from qdqspec.types import QuantizeRules

SKIP, NORM, PAD = "skip-side-of-residual-add", "conv-to-layernorm", "q-before-pad"


def capabilities(*rules: str) -> Capabilities:
    every = tensorrt_capabilities((10, 0), (11, 4))  # all formats
    hooks = {name: hook for name, hook in RULES.items() if name in rules}
    return replace(every, absorbs=frozenset({"Relu"}), rules=hooks)


def space_of(model: Model, *rules: str, fmt: str = "int8") -> SchemeSpace:
    return SchemeSpace(model, capabilities(*rules), rules=QuantizeRules(format=fmt))


def edges_of(space: SchemeSpace, **labels: str) -> set[tuple[str, str]]:
    """The quantized edges as (tensor, reader), without weights."""
    chosen = labels or space.everything()
    sites = space.resolve(chosen).sites
    return {(site.tensor, end.node) for site in sites if not site.weight for end in site.consumers}


RESIDUAL = """(float[1,4,6,6] x) => (float[1,4,6,6] y) {
  a = Conv<pads=[1,1,1,1]>(x, w1)  b = Relu(a)  c = Conv<pads=[1,1,1,1]>(b, w2)
  d = Add(c, b)
  e = Relu(d)  y = Conv<pads=[1,1,1,1]>(e, w3) }"""
KERNELS = {"w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3), "w3": (4, 4, 3, 3)}


def test_only_the_skip_side_of_a_residual_add_is_quantized() -> None:
    space = space_of(model_of(RESIDUAL, **KERNELS), SKIP)
    assert edges_of(space) == {("x", "a"), ("b", "c"), ("b", "d"), ("e", "y")}
    assert space.by_id["c"].labels == ("fp", "in-only")


@pytest.mark.parametrize(
    ("old", "new", "quantized"),
    [
        pytest.param("c, b", "b, c", ["b"], id="the other order"),
        pytest.param("d = Add(c, b)", "s = Conv(x, w4) d = Add(s, c)", ["s"], id="the deeper of two"),
        pytest.param("d = Add(c, b)", "f = Relu(c) d = Add(f, b)", ["f", "b"], id="two activations"),
        pytest.param("y = Conv", "k = Neg(c) y = Conv", ["c", "b"], id="a branch with another reader"),
    ],
)
def test_the_sides_of_an_add_that_are_quantized(old: str, new: str, quantized: list[str]) -> None:
    space = space_of(model_of(RESIDUAL.replace(old, new), **KERNELS, w4=(4, 4, 1, 1)), SKIP)
    assert [tensor for tensor, _ in space.by_id["d"].edges] == quantized


TURN = "Transpose<perm=[0,2,3,1]>"


@pytest.mark.parametrize(
    ("between", "norm_of", "quantized"),
    [
        pytest.param("", "a", "a>y", id="nothing between"),
        pytest.param(f"t = {TURN}(a)", "t", "t>y", id="a copy between"),
        pytest.param(f"r = Relu(a) t = {TURN}(r)", "t", "t>y", id="an activation function of the group"),
        pytest.param(f"t = {TURN}(a) u = {TURN}(a) v = Add(t, u)", "t", "a>t a>u t>y", id="other readers"),
        pytest.param(f"t = Mul(a, a) u = {TURN}(t)", "u", "a>t", id="a computation between"),
        pytest.param(f"s = Shape(a) f = Reshape(x, s) u = {TURN}(f)", "u", "a>s", id="only the shape"),
    ],
)
def test_a_conv_before_a_layernorm_gets_its_pair_on_the_data_edge(
    between: str, norm_of: str, quantized: str
) -> None:
    text = f"""(float[1,4,6,4] x) => (float[A,B,C,D] y)
        {{ a = Conv<pads=[1,1,1,1]>(x, w) {between} y = LayerNormalization<axis=-1>({norm_of}, scale, shift) }}"""
    model = model_of(text, w=(4, 4, 3, 3), scale=(4,), shift=(4,))
    edges = {tuple(edge.split(">")) for edge in quantized.split()}
    assert edges_of(space_of(model, NORM), a="in+out") == {("x", "a")} | edges
    assert edges_of(space_of(model, NORM), a="in-only") == {("x", "a")}


@pytest.mark.parametrize(
    ("pad", "pair"),
    [
        ("Pad(r, pads)", ("r", "p")),
        ("Pad(r, pads, zero)", ("r", "p")),
        ('Pad<mode="reflect">(r, pads)', ("r", "p")),
        ("Pad(r, pads, one)", ("p", "y")),
    ],
)
def test_the_pair_is_moved_before_a_pad_of_zeros(pad: str, pair: tuple[str, str]) -> None:
    text = f"""(float[1,4,6,6] x) => (float[1,4,6,6] y)
        <int64[8] pads = {{0,0,1,1,0,0,1,1}}, float zero = {{0.0}}, float one = {{1.0}}>
        {{ r = Relu(x)  p = {pad}  y = Conv(p, w) }}"""
    model = model_of(text, w=(4, 4, 3, 3))
    assert edges_of(space_of(model), y="in-only") == {("p", "y")}
    assert edges_of(space_of(model, PAD), y="in-only") == {pair}


# ---- sizes, attention and fp8 ------------------------------------------------------------------------


def conv(
    made: int, read: int, kernel: str = "3,3", group: int = 1, *, first: bool = True, size: int = 20
) -> Model:
    shape, source = f"1,{read * group},{size},{size}", "x" if first else "a"
    text = (
        f"(float[{shape}] x) => (float[N,M,H,W] y, float[{shape}] a) "
        f"{{ a = Sigmoid(x)  y = Conv<group={group}>({source}, w) }}"
    )
    return model_of(text, w=(made, read, *map(int, kernel.split(","))))


def product_of(rows: object, *weight: int, op: str = "MatMul") -> Model:
    """A product of so many rows by a weight, transposed for a Gemm."""
    read, made = weight if op == "MatMul" else weight[::-1]
    return model_of(f"(float[{rows},{read}] x) => (float[{rows},{made}] y) {{ y = {op}(x, w) }}", w=weight)


ROW = product_of(1, 64, 32)


@pytest.mark.parametrize(
    ("rule", "model", "int8", "fp8"),
    [
        # those that Model-Optimizer quantizes
        ("few-channel-conv", conv(32, 32), True, True),
        ("few-channel-conv", conv(16, 16), True, False),  # fp8 needs more than 16
        ("few-channel-conv", conv(8, 4), True, False),  # the first of the model
        ("few-channel-conv", conv(8, 4, first=False), False, False),
        ("few-channel-conv", conv(20, 4, first=False), False, False),  # no multiple of 8
        ("few-channel-conv", conv(32, 8, "3,1", first=False), False, False),  # not as wide as high
        ("few-channel-conv", conv(32, 1, group=32, first=False), True, False),  # depthwise
        ("few-channel-conv", conv(32, 1, "1,1", group=32, first=False), False, False),
        ("large-fp8-kernel", conv(32, 32, "5,5"), True, True),
        ("large-fp8-kernel", conv(32, 32, "4,8"), True, False),
        ("large-fp8-kernel", conv(32, 32, "1,31", size=32), True, True),
        ("small-gemm", product_of(4, 64, 32), True, True),
        ("small-gemm", product_of("B", 64, 32), True, True),
        ("small-gemm", ROW, False, False),
        ("small-gemm", product_of(4, 64, 15), False, False),
        ("small-gemm", product_of(4, 15, 32), False, False),
        ("small-gemm", product_of(4, 10, 64, op="Gemm<transB=1>"), False, False),
    ],
    ids=range(17),
)
def test_operators_of_sizes_without_a_fast_kernel_stay_float(
    rule: str, model: Model, int8: bool, fp8: bool
) -> None:
    for fmt, offered in (("int8", int8), ("fp8", fp8)):
        assert "y" in space_of(model, fmt=fmt).by_id
        assert ("y" in space_of(model, rule, fmt=fmt).by_id) == offered, fmt


def test_weight_only_labels_are_offered_for_products_of_one_row() -> None:
    assert "y" in space_of(ROW, "small-gemm", fmt="int4").by_id
    assert space_of(ROW, "small-gemm", fmt="int8+int4").by_id["y"].labels == ("fp", "int4:in-only")
    judged = judge(ROW, capabilities("small-gemm"), backend="tensorrt")
    assert judged.reasons["y"] == "MatMul: rule small-gemm leaves it in float"


CHAIN = """(float[1,32,8,8] x) => (float[1,32,4,4] y) {
  a = Conv<pads=[1,1,1,1]>(x, w)  b = Add(a, x)  c = Conv<pads=[1,1,1,1]>(b, w)  s = Sigmoid(c)  t = Sigmoid(b)
  d = Add(s, t)  e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)  y = Conv<pads=[1,1,1,1]>(e, w) }"""


def test_fp8_is_offered_for_few_operators() -> None:
    model = model_of(CHAIN, w=(32, 32, 3, 3))
    assert {"b", "d", "e"} <= space_of(model, fmt="fp8").by_id.keys()
    # b is residual, since one of its inputs is the output of a convolution; d is not.
    assert space_of(model, "fp8-operators", fmt="fp8").by_id.keys() == {"a", "b", "c", "y"}
    assert {"b", "d", "e"} <= space_of(model, "fp8-operators").by_id.keys()
    mixed = space_of(model, "fp8-operators", fmt="int8+fp8").by_id["e"]
    assert mixed.labels == ("fp", "in+out")  # int8 alone


def attention(
    between: str = "s = Mul(d, c)  m = Add(s, k)  p = Softmax(m)", *, head: int = 32, length: int = 64
) -> Model:
    q, t, k = f"{length},{head}", f"{head},{length}", f"1,{length}"
    text = f"""(float[2,{q}] q, float[2,{t}] t, float[2,{q}] v, float[1,{k}] k) => (float[2,{q}] y)
      {{ d = MatMul(q, t)  {between}  a = MatMul(p, v)  y = Sigmoid(a) }}"""
    return model_of(text, c=(1,))


def test_an_attention_is_one_unit_of_both_products() -> None:
    model = attention()
    assert {"d", "m", "a"} <= space_of(model).by_id.keys()
    space = space_of(model, "whole-attention")
    (unit,) = space.units
    assert unit.nodes == ("d", "s", "m", "p", "a")
    for label in ("in-only", "in+out"):
        sites = space.resolve({"d": label}).sites
        read = {(site.tensor, end.node, end.input) for site in sites for end in site.consumers}
        assert {("q", "d", 0), ("t", "d", 1), ("p", "a", 0), ("v", "a", 1)} <= read
        assert (("a", "y", 0) in read) == (label == "in+out")


@pytest.mark.parametrize(
    ("model", "int8", "fp8"),
    [
        (attention("p = Softmax(d)"), 1, 1),
        (attention("s = Div(d, c)  p = Softmax(s)"), 1, 1),
        (attention("s = Mul(d, c)  m = Add(s, k)  p = Softmax(m)"), 1, 1),
        (attention("m = Add(d, k)  s = Mul(m, c)  p = Softmax(s)"), 1, 0),  # the mask first
        (attention("s = Mul(d, c)  r = Mul(s, c)  p = Softmax(r)"), 1, 0),
        (attention("p = Tanh(d)"), 2, 2),  # two products
        (attention(head=8), 1, 0),
        (attention(head=9), 1, 1),
        (attention(length=513), 0, 1),
    ],
    ids=range(9),
)
def test_an_attention_is_one_unit_if_it_has_a_kernel(model: Model, int8: int, fp8: int) -> None:
    assert len(space_of(model, "whole-attention").units) == int8
    assert len(space_of(model, "whole-attention", fmt="fp8").units) == fp8


def test_one_product_of_an_attention_alone_is_not_offered() -> None:
    model = model_of(
        """(float[2,32,64] q, float[2,64,32] t, float[2,32,8] v) => (float[2,32,8] y)
        { d = MatMul(q, t)  p = Softmax(d)  y = MatMul(p, v) }"""
    )
    assert len(space_of(model, "whole-attention").units) == 1
    assert space_of(model, "whole-attention", "small-gemm").units == ()


def test_a_transpose_before_a_product_of_activations_stays_float() -> None:
    text = """(float[2,32,64] x, float[2,32,64] z) => (float[2,32,32] y, float[2,64,32] o) {
      u = Transpose<perm=[0,2,1]>(z)  y = MatMul(x, u)  v = Transpose<perm=[0,2,1]>(x)  o = Sigmoid(v) }"""
    model = model_of(text)
    assert {"u", "v"} <= space_of(model).by_id.keys()
    assert space_of(model, "transpose-to-matmul").by_id.keys() & {"u", "v"} == {"v"}


# ---- TensorRT for RTX --------------------------------------------------------------------------------


ADA, BLACKWELL = (8, 9), (12, 0)


def rtx_space(model: Model, fmt: str = "int8", compute: tuple[int, int] = BLACKWELL) -> SchemeSpace:
    return SchemeSpace(model, rtx_capabilities([compute]), rules=QuantizeRules(format=fmt))


@pytest.mark.parametrize(
    ("compute", "formats"),
    [
        ([(7, 5)], ["int8"]), ([(8, 0)], ["int8", "int4"]), ([(8, 6), BLACKWELL], ["int8", "int4"]),
        ([ADA], ["int8", "fp8", "int4"]), ([ADA, BLACKWELL], ["int8", "fp8", "int4"]),
        ([BLACKWELL], ["int8", "fp8", "int4", "nvfp4"]),
    ],
)  # fmt: skip
def test_formats_are_those_of_all_compute_capabilities(
    compute: list[tuple[int, int]], formats: list[str]
) -> None:
    can = rtx_capabilities(compute)
    assert list(can.formats) == formats
    assert can.lacking.keys() == RTX_FORMATS.keys() - set(formats)
    if compute == [(8, 6), BLACKWELL]:
        assert can.lacking["fp8"] == "fp8 needs compute capability 8.9, and engines are for 8.6 too"


@pytest.mark.parametrize(
    ("op", "offered"),
    [
        ("MaxPool<kernel_shape=[2,2]>", {("int8", ADA), ("int8", BLACKWELL)}),
        ("AveragePool<kernel_shape=[2,2]>", set()),
        ("GlobalAveragePool", {("int8", BLACKWELL)}),
    ],
)
def test_pooling_is_offered_where_it_has_a_kernel(op: str, offered: set[tuple[str, tuple[int, int]]]) -> None:
    model = model_of(f"(float[1,16,8,8] x) => (float[1,16,H,W] y) {{ t = {op}(x)  y = Sigmoid(t) }}")
    for case in product(("int8", "fp8"), (ADA, BLACKWELL)):
        assert bool(rtx_space(model, *case).units) == (case in offered)


@pytest.mark.parametrize(
    ("kernel", "fp8"), [((4, 8), True), ((1, 32), True), ((1, 33), False), ((5, 7), False)]
)
def test_kernels_up_to_32_elements_are_offered_in_fp8(kernel: tuple[int, int], fp8: bool) -> None:
    text = "(float[1,32,40,40] x) => (float[1,32,H,W] y) { y = Conv(x, w) }"
    assert bool(rtx_space(model_of(text, w=(32, 32, *kernel)), "fp8").units) == fp8
    assert rtx_space(model_of(text, w=(32, 32, *kernel))).units


def test_an_attention_is_quantized_with_its_result() -> None:
    (unit,) = rtx_space(attention("p = Softmax(d)")).units
    assert unit.labels == ("fp", "in+out")
    assert {tensor for tensor, _ in unit.edges} == {"q", "t", "p", "v"}
    (weighted,) = rtx_space(product_of(4, 64, 64)).units
    assert "in-only" in weighted.labels
