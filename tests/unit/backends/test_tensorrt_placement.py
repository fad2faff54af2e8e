"""Which pairs each placement rule of TensorRT moves or omits."""

from __future__ import annotations

import pytest
from graph_text import model_of

from qdqspec.backends.base import Capabilities
from qdqspec.backends.tensorrt import placement
from qdqspec.backends.tensorrt.ops import RULES
from qdqspec.graph.model import Model
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.qdq.space.units import Unit

BOTH = ("in+out", "in-only")
SKIP, NORM, PAD = "skip-side-of-residual-add", "conv-to-layernorm", "q-before-pad"


def space_of(model: Model, *rules: str) -> SchemeSpace:
    ops = ("Conv", "Gemm", "MatMul")
    capabilities = Capabilities(
        formats=("int8",),
        labels={**dict.fromkeys(ops, BOTH), "Add": ("in+out",)},
        activations={"int8": "int8"},
        weights={"int8": "int8"},
        absorbs=frozenset({"Relu"}),
        rules={name: hook for name, hook in RULES.items() if name in rules},
    )
    return SchemeSpace(model, capabilities)


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


@pytest.mark.parametrize("rule", RULES)
def test_the_work_of_a_rule_is_linear_in_the_number_of_units(rule: str, monkeypatch) -> None:
    """Ten times the blocks take at most twelve times the calls: quadratic work would make large models impossible."""

    def looks(blocks: int) -> int:
        body = "".join(f"c{i} = Conv(x{i}, w) x{i + 1} = Add(c{i}, x{i}) " for i in range(blocks))
        text = f"(float[1,4,6,6] x0) => (float[1,4,6,6] y) {{ {body} y = Neg(x{blocks}) }}"
        seen: list[Unit] = []
        monkeypatch.setattr(placement, "_is_weighted", lambda unit: seen.append(unit) or real(unit))
        space_of(model_of(text, w=(4, 4, 1, 1)), rule)
        return len(seen)

    real = placement._is_weighted
    assert looks(50) <= 12 * looks(5)


TURN = "Transpose<perm=[0,2,3,1]>"


@pytest.mark.parametrize(
    ("between", "norm_of", "quantized"),
    [
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
    text = f"""(float[1,4,6,6] x) => (float[1,6,6,4] y)
        {{ a = Conv<pads=[1,1,1,1]>(x, w) {between} y = LayerNormalization<axis=-1>({norm_of}, scale, shift) }}"""
    model = model_of(text, w=(4, 4, 3, 3), scale=(4,), shift=(4,))
    edges = {tuple(edge.split(">")) for edge in quantized.split()}
    assert edges_of(space_of(model, NORM), a="in+out") == {("x", "a")} | edges
    assert edges_of(space_of(model, NORM), a="in-only") == {("x", "a")}


def test_a_conv_directly_before_a_layernorm_keeps_the_pair_between_them() -> None:
    text = """(float[1,4,4,4] x) => (float[1,4,4,4] y)
        { a = Conv<pads=[1,1,1,1]>(x, w) y = LayerNormalization<axis=-1>(a, scale, shift) }"""
    model = model_of(text, w=(4, 4, 3, 3), scale=(4,), shift=(4,))
    assert edges_of(space_of(model, NORM)) == {("x", "a"), ("a", "y")}


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
