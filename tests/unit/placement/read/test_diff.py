"""The difference of two models, as data and as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from onnx_text import parsed

from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.diff import SkeletonDiff, diff_models
from qdqspec.qdq.strip import StrippedModel

DATA = Path(__file__).parents[3] / "data"
F32 = np.float32


def net(text: str, **constants: object) -> Model:
    return parsed(text, 21, ir=10, **constants)


def pair(scale: object = F32(0.5), zero_point: object = np.uint8(3), attributes: str = "") -> Model:
    return net(
        f"""g (float[2,2] x) => (float[2,2] y) {{
            q = QuantizeLinear{attributes}(x, s, z)  d = DequantizeLinear{attributes}(q, s, z)
            y = Neg(d) }}""",
        s=np.asarray(scale, F32),
        z=zero_point,
    )


def stored(integers: list[int], scale: float = 0.5) -> Model:
    return net(
        "g (float[2] x) => (float[2] y) { w = DequantizeLinear(i, s)  y = Mul(x, w) }",
        i=np.array(integers, np.int8),
        s=F32(scale),
    )


def floating(weight: list[float]) -> Model:
    return net("g (float[2] x) => (float[2] y) { y = Mul(x, w) }", w=np.array(weight, F32))


FLOAT_WEIGHT = net(
    """g (float[2] x) => (float[2] y) {
        q = QuantizeLinear<output_dtype = 3>(w, s)  d = DequantizeLinear(q, s)  y = Mul(x, d) }""",
    w=np.array([1.0, -2.0], F32),
    s=F32(0.5),
)
CHANNELS = [pair(np.array(scales, F32), np.zeros(2, np.uint8)) for scales in ([1, 2], [1.1, 1.9])]


@pytest.mark.parametrize(
    ("one", "other", "kinds", "words"),
    [
        (pair(), pair(F32(0.55)), ["scale"], "scale 0.5 > 0.55 (+10.0 %)"),
        (pair(), pair(zero_point=np.uint8(4)), ["zero point"], "zero point 3 > 4"),
        (pair(), pair(zero_point=np.int8(3)), ["format"], "uint8 > int8"),
        (pair(), pair([0.5, 0.6], np.array([3, 3], np.uint8)), ["axis", "scale"], "1 > 2 scales"),
        (pair(), pair(np.nextafter(F32(0.5), F32(1))), ["scale"], "(+1.2e-05 %)"),
        (*CHANNELS, ["scale"], "2 of 2 scales (-5.0 % to +10.0 %)"),
        (stored([2, -4]), stored([3, -4]), ["integers"], "1 of 2 integers, by up to 1 steps"),
        (FLOAT_WEIGHT, stored([2, -4]), ["storage"], "float behind Q and DQ > stored as integers"),
    ],
    ids=["scale", "zero point", "format", "axis", "last bit", "channels", "integer", "storage"],
)
def test_changed_numbers_of_a_pair_are_reported(
    one: Model, other: Model, kinds: list[str], words: str
) -> None:
    found = diff_models(one, other)
    (change,) = found.changed
    assert [each.kind for each in change.changes] == kinds
    assert words in ", ".join(each.text for each in change.changes)
    is_weight = kinds in (["integers"], ["storage"])
    assert (change.tensor, change.readers) == (("w", ("Mul#0:1",)) if is_weight else ("x", ("Neg#0:0",)))
    assert not found.same
    assert not found.skeleton.differs
    assert diff_models(one, one).same


def test_an_unnamed_node_that_was_added_renumbers_no_other() -> None:
    text = "g (float[2] x) => (float[2] y) {{ a = Exp(x) {} }}"
    one = net(text.format("b = Neg(a)  y = Mul(b, w)"), w=np.array([1, 2], F32))
    other = net(text.format("c = Abs(a)  b = Neg(c)  y = Mul(b, w)"), w=np.array([1, 2], F32))
    skeleton = diff_models(one, other).skeleton
    assert skeleton == SkeletonDiff(added=("Abs#1",), changed=("'Neg#1': reads a > c",))
    swapped = net(text.format("b = Neg(a)  y = Mul(w, b)"), w=np.array([1, 2], F32))
    assert diff_models(one, swapped).skeleton.differs


CHAINS = {"read between": "u = DequantizeLinear(q, s, z)  o = Neg(d)", "not read between": "o = Neg(x)"}


def chain(between: str, second: bool, one: object = F32(0.5)) -> Model:
    last = "p = QuantizeLinear(d, t, v)  e = DequantizeLinear(p, t, v)  y = Neg(e)"
    alone = "p = QuantizeLinear(x, t, v)  e = DequantizeLinear(p, t, v)  y = Neg(e)"
    first = "q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)"
    return net(
        f"g (float[2,2] x) => (float[2,2] y, float[2,2] o) {{ {first} {between} {last if second else alone} }}",
        s=one, z=np.uint8(3), t=F32(0.25), v=np.int8(0),
    )  # fmt: skip


@pytest.mark.parametrize("between", CHAINS.values(), ids=CHAINS)
def test_a_tensor_that_is_quantized_twice_differs_from_one_that_is_quantized_once(between: str) -> None:
    twice, once = chain(between, second=True), chain(between, second=False)
    for models, words in (
        ((twice, once), "behind 1 other pair > behind none"),
        ((once, twice), "> behind 1"),
    ):
        found = diff_models(*models)
        assert [change.kind for pair in found.changed for change in pair.changes] == ["chain"]
        assert words in found.text()
        assert not found.added
        assert not found.removed
    assert diff_models(twice, chain(between, second=True)).same
    rescaled = diff_models(twice, chain(between, second=True, one=F32(0.75))).text()
    assert "behind 1 other pair > behind 1 with other numbers" in rescaled


def test_a_weight_rounded_to_integers_is_the_same_float_model() -> None:
    found = diff_models(floating([1.1, -2.2]), stored([2, -4]))
    assert not found.skeleton.differs
    assert [p.tensor for p in found.added] == ["w"]
    far = diff_models(floating([1.4, -2.2]), stored([2, -4]))
    assert far.skeleton.constants == ("'w': 1 of 2 values, by up to 0.4, by more than rounding to integers",)


@pytest.mark.parametrize(
    ("ports", "nodes", "part", "words"),
    [
        ("float[2] x", "t = Abs(x)  y = Mul(t, w)", "added", "Abs#0"),
        ("float[2] x", "y = Add(x, w)", "added", "Add#0"),
        ("float[2] x", "y = Mul(w, x)", "changed", "'Mul#0': reads x, (constant) > (constant), x"),
        ("float[2] x", "u = Mul(x, w)", "interface", "output 'y' removed"),
        ("float[2] x, float v", "y = Mul(x, w)", "interface", "input 'v' added"),
        ("float[N] x", "y = Mul(x, w)", "interface", "input 'x': other type or shape"),
    ],
)
def test_differences_of_the_float_models_are_reported(ports: str, nodes: str, part: str, words: str) -> None:
    text = f"g ({ports}) => (float[2] {nodes.rpartition('=')[0].split()[-1]}) {{ {nodes} }}"
    found = diff_models(floating([1, 2]), net(text, w=np.array([1.0, 2.0], F32)))
    assert words in getattr(found.skeleton, part)
    assert not found.same


def test_connections_are_compared_and_names_of_inner_tensors_are_not() -> None:
    text = "g (float[2] x) => (float[2] y) {{ {0} = Abs(x)  {1} = Neg({2})  y = Add({0}, {1}) }}"
    one, renamed = net(text.format("a", "b", "a")), net(text.format("c", "a", "c"))
    assert diff_models(one, renamed).same
    crossed = diff_models(one, net(text.format("a", "b", "x")))
    assert crossed.skeleton.changed == ("'Neg#1': reads a > x",)
    swapped = "g (float[2] x) => (float[2] y, float[2] z) {{ {} = Abs(x)  {} = Neg(x) }}"
    found = diff_models(net(swapped.format("y", "z")), net(swapped.format("z", "y")))
    assert found.skeleton.changed == ("'Abs#0': makes y > z", "'Neg#1': makes z > y")


@pytest.mark.parametrize(
    "pair",
    [
        "q, s, z = DynamicQuantizeLinear(x)  d = DequantizeLinear(q, s, z)",
        "s = Constant<value_float = 0.5>()  q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)",
    ],
    ids=["scales found at run time", "a scale in a Constant"],
)
def test_pairs_in_a_branch_leave_its_operators_equal(pair: str) -> None:
    branches = ("u = MatMul(x, x)", f"{pair}  u = MatMul(d, d)")
    texts = (
        f"""g (bool c, float[2,2] x) => (float[2,2] y) {{
            y = If (c) <then_branch = t () => (float[2,2] u) {{ {branch} }},
                        else_branch = e () => (float[2,2] v) {{ v = Neg(x) }}> }}"""
        for branch in branches
    )
    difference = diff_models(*map(net, texts))
    assert len(difference.added) == 1
    assert not difference.skeleton.differs


def test_a_folded_batch_normalization_is_reported_but_is_no_difference(models: Path) -> None:
    given = load_model(models / "ultraface_rfb320.onnx")
    folded = fold_batchnorm(given)
    for first, second in ((given, folded.model), (folded.model, given)):
        found = diff_models(first, second)
        assert found.same
        assert found.skeleton.folded == folded.removed
        assert found.text().startswith("no Q/DQ in either; the float models are the same")
        assert "35 nodes folded into convolutions or weights in one of them" in found.text()
    assert diff_models(given, given).skeleton.folded == ()
    weight = next(t for t in folded.model.proto.graph.initializer if t.name.endswith("/weight"))
    weight.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(weight), weight.name))
    found = diff_models(given, Model(folded.model.proto))
    assert not found.same
    assert len(found.skeleton.constants) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{} n = BatchNormalization(x, s, b, m, v)  {} c = Conv(n, w)  {} y = BatchNormalization(c, s, b, m, v)",
        "{} a = Add(w, w)  {} n = Mul(x, s)  {} c = Add(n, n)  {} y = Conv(c, a)",
    ],
)
def test_a_node_that_both_have_is_folded_in_neither(text: str) -> None:
    """Only one has names: the folded nodes are known by the tensors that they make."""
    values = {name: np.full(2, 2, F32) for name in "bmv"}
    one, other = (
        net(f"g (float[1,2,4,2] x) => (y) {{ {text.format(*names)} }}", s=np.full(2, 3, F32), w=(2, 2, 1, 1), **values)
        for names in (["[a]", "[b]", "[c]", "[d]"], [""] * 4)
    )  # fmt: skip
    for found in (diff_models(one, other), diff_models(other, one)):
        assert found.same
        assert found.skeleton.folded == ()


def test_q_and_dq_that_are_no_pairs_are_counted() -> None:
    """A DequantizeLinear of an input is part of both float models."""
    model = net("g (int8[4] x) => (float[4] y) { d = DequantizeLinear(x, s) y = Neg(d) }", s=F32(0.5))
    found = diff_models(model, model)
    assert found.same
    assert found.text() == (
        "no Q/DQ pairs that can be removed in either, and 1 other Q or DQ; the float models are the same"
    )


def test_attributes_opset_and_constants_are_compared() -> None:
    leaky = "g (float[2] x) => (float[2] y) {{ y = LeakyRelu<alpha = {}>(x) }}"
    found = diff_models(net(leaky.format(0.1)), net(leaky.format(0.2)))
    assert found.skeleton.changed == ("'LeakyRelu#0': other attributes",)
    assert diff_models(floating([1, 2]), floating([1, 3])).skeleton.constants == (
        "'w': 1 of 2 values, by up to 1",
    )
    older = Model(floating([1, 2]).proto)
    older.proto.opset_import[0].version = 19
    assert diff_models(older, floating([1, 2])).skeleton.interface == ("opset 19 > 21",)


def test_a_relu_that_a_tool_removed_is_no_difference(models: Path) -> None:
    found = diff_models(
        load_model(models / "digits_resnet.onnx"), load_model(DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx")
    )
    assert found.skeleton.added == found.skeleton.removed == found.skeleton.changed == ()
    assert found.skeleton.constants == ()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("few", "digits_resnet_qat_qdq", "qdq_modelopt_digits_resnet"),
        ("many", "qdq_ort_u8s8_digits_resnet_b1", "qdq_nncf_digits_resnet"),
    ],
)
def test_the_text_of_a_difference(
    name: str, first: str, second: str, golden: Callable[[str, str], None]
) -> None:
    found = diff_models(load_model(DATA / f"{first}.onnx"), load_model(DATA / f"{second}.onnx"))
    golden(f"placement/diff-{name}.txt", found.text(most=3 if name == "many" else None) + "\n")


def test_a_relu_behind_a_pair_of_its_own_was_not_removed() -> None:
    before, after = (
        net(
            f"""g (float[2] x) => (float[2] y) {{ c = Neg(x)
                q = QuantizeLinear(c, s, z)  {name} = DequantizeLinear(q, s, z)  r = Relu({name})
                p = QuantizeLinear(r, s, z)  e = DequantizeLinear(p, s, z)  y = Neg(e) }}""",
            s=F32(0.5),
            z=np.uint8(3),
        )
        for name in ("d", "other")
    )
    stripped = StrippedModel(after, activations=before).stripped
    assert [node.op_type for node in stripped.nodes] == ["Neg", "Relu", "Neg"]


@pytest.mark.parametrize(
    "nodes",
    [
        "q = QuantizeLinear(x, t, z)  d = DequantizeLinear(q, s, z)",  # the second scale differs: nodes of the model
        "q = QuantizeLinear<axis = 0>(x, v, z)  d = DequantizeLinear<axis = 1>(q, v, z)",
        "a = ReduceMax<keepdims = 0>(x)  k = Mul(a, s)  q = QuantizeLinear(x, k)  d = DequantizeLinear(q, k)",
        "q = QuantizeLinear<precision = 1>(x, s, z)  d = DequantizeLinear(q, s, z)",
        "q = QuantizeLinear<output_dtype = 19>(x, s)  d = DequantizeLinear(q, s)",
        "d = DequantizeLinear<axis = 1, block_size = 2>(i, b)",
    ],
)
def test_pairs_that_no_scheme_carries_are_compared_too(nodes: str) -> None:
    def made(scale: float) -> Model:
        zero = np.zeros(2 if "v" in nodes else (), np.uint8)
        constants = {"s": F32(scale), "t": F32(0.5), "z": zero, "v": np.array([1, scale], F32)}
        constants |= {"i": np.ones((2, 2), np.int8), "b": np.full((2, 1), scale, F32)}
        text = f"g (float[2,2] x) => (float[2,2] y) {{ {nodes}  y = Add(x, d) }}"
        return parsed(
            text, 23, ir=11, **{k: v for k, v in constants.items() if re.search(rf"\W{k}\b", nodes)}
        )

    assert diff_models(made(0.25), made(0.25)).same
    found = diff_models(made(0.25), made(0.75))
    kinds = [change.kind for pair in found.changed for change in pair.changes]
    assert kinds in (["numbers"], ["scale"]) or found.skeleton.constants
