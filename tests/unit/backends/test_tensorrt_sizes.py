"""Placement rules for sizes, attention and fp8: each omits the units that its source names, in its formats only."""

from __future__ import annotations

import pytest
from graph_text import model_of

from qdqspec.backends.base import Capabilities
from qdqspec.backends.tensorrt import ops as trt_ops
from qdqspec.graph.model import Model
from qdqspec.qdq.space.judging import judge
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import QuantizeRules

FORMATS = ("int8", "fp8", "int4", "nvfp4", "mxfp8")


def capabilities(*rules: str) -> Capabilities:
    return Capabilities(
        formats=FORMATS,
        labels=trt_ops.LABELS,
        activations={name: name for name in FORMATS if name != "int4"},
        weights={name: name for name in FORMATS},
        blocked_axes=trt_ops.BLOCKED_AXES,
        rules={name: hook for name, hook in trt_ops.RULES.items() if name in rules},
    )


def space_of(model: Model, *rules: str, fmt: str = "int8") -> SchemeSpace:
    return SchemeSpace(model, capabilities(*rules), rules=QuantizeRules(format=fmt))


def conv(
    made: int, read: int, kernel: str = "3,3", group: int = 1, *, first: bool = True, size: int = 20
) -> Model:
    shape, source = f"1,{read * group},{size},{size}", "x" if first else "a"
    text = (
        f"(float[{shape}] x) => (float[N,M,H,W] y, float[{shape}] a) "
        f"{{ a = Sigmoid(x)  y = Conv<group={group}>({source}, w) }}"
    )
    return model_of(text, w=(made, read, *map(int, kernel.split(","))))


def product(text: str, *weight: int) -> Model:
    return model_of(text, w=weight)


ROW = product("(float[1,64] x) => (float[1,32] y) { y = MatMul(x, w) }", 64, 32)


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
        (
            "small-gemm",
            product("(float[4,64] x) => (float[4,32] y) { y = MatMul(x, w) }", 64, 32),
            True,
            True,
        ),
        (
            "small-gemm",
            product("(float[B,64] x) => (float[B,32] y) { y = MatMul(x, w) }", 64, 32),
            True,
            True,
        ),
        ("small-gemm", ROW, False, False),
        (
            "small-gemm",
            product("(float[4,64] x) => (float[4,15] y) { y = MatMul(x, w) }", 64, 15),
            False,
            False,
        ),
        (
            "small-gemm",
            product("(float[4,15] x) => (float[4,32] y) { y = MatMul(x, w) }", 15, 32),
            False,
            False,
        ),
        (
            "small-gemm",
            product("(float[4,64] x) => (float[4,10] y) { y = Gemm<transB=1>(x, w) }", 10, 64),
            False,
            False,
        ),
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
    ids = space_of(model, "transpose-to-matmul").by_id.keys()
    assert "u" not in ids
    assert "v" in ids
