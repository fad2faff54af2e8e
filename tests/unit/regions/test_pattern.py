"""Conditions under which patterns are equal or different."""

from __future__ import annotations

from onnx_text import parsed

from qdqspec.graph.model import Model
from qdqspec.graph.regions.pattern import LabelledGraph, canonical_order
from tests.support.patterns import canonical


def model_of(body: str, shape: str = "4,4") -> Model:
    return parsed(f"g (float[{shape}] x, float[{shape}] z) => (float y) {{ {body} }}")


def digest(body: str, shape: str = "4,4", granularity: str = "structure+shapes") -> str:
    model = model_of(body, shape)
    return canonical(model, [node.name for node in model.nodes], granularity).digest


def test_the_digest_of_a_pattern_is_stable():
    assert digest("a = Relu(x) y = Add(a, z)") == "p1-3de73e1b49c199e1"


def test_attributes_arity_and_element_types_change_a_pattern():
    assert digest("y = Softmax <axis = 0> (x)") != digest("y = Softmax <axis = 1> (x)")
    assert digest("y = Sum(x, z)") != digest("y = Sum(x, z, z)")
    assert digest("y = Cast <to = 10> (x)") != digest("y = Cast <to = 11> (x)")


def test_a_body_that_reads_its_own_condition_has_the_pattern_of_a_constant():
    def found(condition: str) -> str:
        model = parsed(f"""g (bool c, float[4] x) => (float[4] y) <bool d = {{1}}> {{ a = Relu(x)
            b = If(c) <then_branch = t () => (float[4] m) {{ m = Where({condition}, a, x) }},
                       else_branch = e () => (float[4] n) {{ n = Identity(a) }}>
            y = Sub(a, b) }}""")
        return canonical(model, [node.name for node in model.nodes if not node.scope][1:]).digest

    assert found("c") == found("d")


def depthwise(channels: int, groups: int, granularity: str) -> str:
    weight = f"{channels},{channels // groups},3,3"
    model = parsed(
        f"g (float[1,{channels},8,8] x, float[{weight}] w) => (float y) {{ y = Conv <group = {groups}> (x, w) }}"
    )
    return canonical(model, [node.name for node in model.nodes], granularity).digest


def test_depthwise_convolutions_of_any_width_have_one_structure():
    """For depthwise convolutions, the number of groups is a shape and not an attribute."""
    assert depthwise(4, 4, "structure") == depthwise(8, 8, "structure")
    assert depthwise(8, 2, "structure") != depthwise(8, 8, "structure")
    assert depthwise(8, 2, "structure") != depthwise(8, 4, "structure")
    assert depthwise(8, 1, "structure") != depthwise(8, 8, "structure")
    assert depthwise(4, 4, "structure+shapes") != depthwise(8, 8, "structure+shapes")


def test_the_text_of_a_pattern_shows_branches_and_skips():
    model = model_of("e = Relu(x) a = Neg(e) b = Abs(e) c = Add(a, b) y = Mul(c, z)")
    names = [node.name for node in model.nodes]
    assert canonical(model, names).text == "Relu > (Abs | Neg) > Add > Mul"
    skip = model_of("e = Relu(x) a = Neg(e) y = Add(a, e)")
    assert canonical(skip, [n.name for n in skip.nodes]).text == "Relu > (Neg | skip) > Add"


def ring(sizes: list[int], start: int = 0) -> LabelledGraph:
    """Rings of sources, joined in neighbouring pairs: refinement alone does not distinguish their sizes."""
    count = sum(sizes)
    labels, edges = ["source"] * count, [[] for _ in range(count)]
    first = 0
    for size in sizes:
        for i in range(size):
            pair = (first + (start + i) % size, first + (start + i + 1) % size)
            labels.append("join")
            edges.append([(0, pair[0], 0), (0, pair[1], 0)])
        first += size
    return LabelledGraph(labels, edges)


def test_rings_that_refinement_does_not_distinguish_have_different_orders_from_any_start():
    assert canonical_order(ring([6]))[1] != canonical_order(ring([3, 3]))[1]
    assert canonical_order(ring([6, 6]))[1] == canonical_order(ring([6, 6], start=1))[1]


def test_many_equal_branches_are_ordered_in_limited_time():
    count = 300
    edges = [[], *([(0, 0, 0)] for _ in range(count)), [(0, i + 1, 0) for i in range(count)]]
    order, certificate = canonical_order(LabelledGraph(["root", *["branch"] * count, "join"], edges))
    assert sorted(order) == list(range(count + 2))
    assert certificate.count("branch") == count
