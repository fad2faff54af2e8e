"""Regions found in graphs of known structure, their patterns, and pattern expressions."""

from __future__ import annotations

from contextlib import closing

import pytest
from onnx_text import parsed

from qdqspec.app.session import Session
from qdqspec.errors import PatternError, SpecError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.expressions import (
    BUILT_INS,
    matched_nodes,
    parse,
    select_nodes,
)
from qdqspec.graph.regions.pattern import Pattern, canonical_order
from qdqspec.graph.regions.search import find_regions, groups_of
from qdqspec.types import Case, LayerTime, PatternRules, RegionRules
from tests.support.patterns import canonical


def model_of(body: str, result: str = "y") -> Model:
    return parsed(f"g (float[1,4,8,8] x) => (float {result}) {{ {body} }}", w=(4, 4, 1, 1))


FORK = """{0}a = Conv({1}, w) {0}b = Relu({0}a) {0}c = Conv({0}b, w) {0}d = Relu({0}c)
    {0}e = Conv({1}, w) {0}f = Sigmoid({0}e) {0}g = Conv({0}f, w) {0}h = Sigmoid({0}g)
    {0} = Add({0}d, {0}h) """


def test_large_branchings_are_composites_of_their_branches():
    regions = find_regions(model_of(FORK.format("p", "x") + FORK.format("y", "p")), RegionRules(max_nodes=6))
    composites = [region for region in regions if region.type == "COMPOSITE"]
    assert [r.id for r in composites] == ["r0.0", "r0.1"]
    texts = [r.pattern_text for r in regions if r.parent == "r0.1"]
    assert texts == ["Conv > Relu > Conv > Relu", "Conv > Sigmoid > Conv > Sigmoid > Add"]


def test_long_sequences_are_cut_into_equal_parts_at_anchors():
    links = "".join(f"c{i} = Conv({f'r{i - 1}' if i else 'x'}, w) r{i} = Relu(c{i})" for i in range(12))
    regions = find_regions(model_of(links, "r11"))
    assert [len(r.nodes) for r in regions if r.type == "LEAF"] == [8, 8, 8]


def test_shape_arithmetic_constants_and_copies_are_no_separate_regions():
    body = """c = Conv(x, w) t = Transpose <perm = [0, 2, 3, 1]> (c)
    s = Shape(c) i = Constant <value_ints = [0]> () g = Gather(s, i) m = Constant <value_ints = [-1]> ()
    k = Concat <axis = 0> (g, m) y = Reshape(t, k)"""
    regions = find_regions(model_of(body), RegionRules(max_nodes=2))
    assert [r.type for r in regions] == ["ROOT", "LEAF"]
    assert len(regions[1].nodes) == 6
    assert regions[1].pattern_text == "Conv > Transpose > Reshape"


def test_a_mask_read_by_every_layer_does_not_join_the_layers():
    model = parsed(
        """g (float[4,4] x, float[4,4] mask) => (float[4,4] y) { m = Neg(mask)
        a = MatMul(x, w) b = Add(a, m) c = Softmax(b) d = MatMul(c, w) e = Add(d, x)
        f = MatMul(e, w) h = Add(f, m) i = Softmax(h) j = MatMul(i, w) y = Add(j, e) }""",
        w=(4, 4),
    )
    regions = find_regions(model)
    first, second, mask = (region for region in regions if region.type == "LEAF")
    assert mask.nodes == ("Neg#0",)
    assert set(first.nodes) == {"MatMul#1", "Add#2", "Softmax#3", "MatMul#4", "Add#5"}
    assert set(second.nodes) == {"MatMul#6", "Add#7", "Softmax#8", "MatMul#9", "Add#10"}
    assert first.pattern == second.pattern


def test_tensors_read_inside_a_body_are_inputs_of_its_owner():
    model = parsed(
        """g (bool c, float[4] x) => (float[4] y) { a = Relu(x)
        y = If (c) < then_branch = t () => (float[4] p) { p = Neg(a) },
                     else_branch = e () => (float[4] q) { q = Identity(a) } > }"""
    )
    regions = find_regions(model, RegionRules(by="manual", manual=(("If*",),)))
    assert [region.inputs for region in regions if region.nodes == ("If#1",)] == [("c", "a")]


def test_regions_given_by_kernels_or_by_globs():
    """Nodes in none of them are grouped by structure, and names that the backend made are skipped."""
    model = model_of("a = Conv(x, w) b = Relu(a) c = Conv(b, w) y = Relu(c)")
    assert find_regions(model, RegionRules(by="names")) == find_regions(model), "no module names"
    kernels = [("Conv#0", "Relu#1"), ("Relu#1", "made_by_backend"), ("Relu#1",), ()]
    layers = [LayerTime(name="k", op_type="K", milliseconds=1.0, nodes=nodes) for nodes in kernels]
    layers.append(LayerTime(name="c", op_type="C", milliseconds=1.0, nodes=("Conv#2",), boundary=True))
    groups = groups_of(layers)
    assert groups == (("Conv#0", "Relu#1"), ("made_by_backend",)), "a node belongs to its first kernel"
    regions = find_regions(model, RegionRules(by="fusion"), groups=groups)
    assert [r.nodes for r in regions if r.type == "LEAF"] == [("Conv#0", "Relu#1"), ("Conv#2", "Relu#3")]
    regions = find_regions(model, RegionRules(by="manual", manual=(("Relu#1", "Conv#2"),)))
    assert ("Relu#1", "Conv#2") in [r.nodes for r in regions]
    with pytest.raises(SpecError, match=r"'Rely#1'\] matches no node \(did you mean 'Relu#1'\?\)"):
        find_regions(model, RegionRules(by="manual", manual=(("Rely#1",),)))


@pytest.mark.parametrize("source", ["path", "metadata"])
def test_regions_by_names_follow_the_module_names(source):
    model = model_of("a = Conv(x, w) b = Relu(a) c = Conv(b, w) d = Relu(c) e = Conv(d, w) y = Relu(e)")
    scopes = ["stem", "stem", "layer.0", "layer.0", "layer.1", "layer.1"]
    for node, scope in zip(model.proto.graph.node, scopes, strict=True):
        if source == "path":
            node.name = f"/{scope.replace('.', '/')}/{node.op_type}"
        else:
            outer = [scope.split(".")[0]] if "." in scope else []
            entry = node.metadata_props.add()
            entry.key, entry.value = "pkg.torch.onnx.name_scopes", repr(["", *outer, scope, node.op_type])
    regions = find_regions(Model(model.proto), RegionRules(by="names", max_nodes=2))
    shape = [(r.type, len(r.nodes), r.parent) for r in regions if r.type != "ROOT"]
    # Two of three modules are more than half of the model, so that level is omitted.
    assert shape == [("LEAF", 2, "r0")] * 3


def test_regions_by_the_kernels_of_onnx_runtime(tmp_path, models):
    """ONNX Runtime runs Conv, residual Add and Relu as one kernel, which is one region."""
    rules = RegionRules(by="fusion", max_nodes=50)
    case = Case(id="default", model=models / "digits_resnet.onnx", regions=rules)
    with closing(Session(root=tmp_path)) as session:
        leaves = [set(region.nodes) for region in session.regions(case) if region.type == "LEAF"]
    block = "/layer1/layer1.0"
    assert {f"{block}/conv2/Conv", f"{block}/Add", f"{block}/Relu_1"} in leaves
    assert {f"{block}/conv1/Conv", f"{block}/Relu"} in leaves


def pattern(body: str) -> Pattern:
    model = parsed(f"g (float[4,4] x, float[4,4] z) => (float y) {{ {body} }}")
    return canonical(model, [node.name for node in model.nodes])


def test_the_digest_of_a_pattern_is_stable():
    assert pattern("a = Relu(x) y = Add(a, z)").digest == "p1-3de73e1b49c199e1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("y = Softmax <axis = 0> (x)", "y = Softmax <axis = 1> (x)"),
        ("y = Sum(x, z)", "y = Sum(x, z, z)"),
        ("y = Cast <to = 10> (x)", "y = Cast <to = 11> (x)"),
    ],
)
def test_attributes_arity_and_element_types_change_a_pattern(one, other):
    assert pattern(one).digest != pattern(other).digest


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
    fork = pattern("e = Relu(x) a = Neg(e) b = Abs(e) c = Add(a, b) y = Mul(c, z)")
    assert fork.text == "Relu > (Abs | Neg) > Add > Mul"
    assert pattern("e = Relu(x) a = Neg(e) y = Add(a, e)").text == "Relu > (Neg | skip) > Add"


def ring(sizes: list[int], start: int = 0) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
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
    return labels, edges


def test_rings_that_refinement_does_not_distinguish_have_different_orders_from_any_start():
    assert canonical_order(*ring([6]))[1] != canonical_order(*ring([3, 3]))[1]
    assert canonical_order(*ring([6, 6]))[1] == canonical_order(*ring([6, 6], start=1))[1]


def test_many_equal_branches_are_ordered_in_limited_time():
    count = 300
    edges = [[], *([(0, 0, 0)] for _ in range(count)), [(0, i + 1, 0) for i in range(count)]]
    order, certificate = canonical_order(["root", *["branch"] * count, "join"], edges)
    assert sorted(order) == list(range(count + 2))
    assert certificate.count("branch") == count


BODY = """
    c1 = Conv(x, w) b1 = BatchNormalization(c1, s, s, s, s) r1 = Relu(b1)
    c2 = Conv <group = 1> (r1, w) r2 = Clip(c2)
    c3 = Conv(r2, w) a3 = Add(c3, r1) r3 = Relu(a3)
    t = Transpose <perm = [0, 2, 3, 1]> (r3) y = LeakyRelu <alpha = 0.1> (t)
"""


@pytest.fixture(scope="module")
def model() -> Model:
    return parsed(f"g (float[1,4,8,8] x) => (float y) {{ {BODY} }}", 15, w=(4, 4, 1, 1), s=(4,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Transpose", "Transpose#8"),
        ("Conv > Relu", ""),
        (
            "Conv > BatchNormalization? > (Relu|Clip)?",
            "Conv#0 BatchNormalization#1 Relu#2 Conv#3 Clip#4 Conv#5",
        ),
        ("conv-add-relu", "Conv#5 Add#6 Relu#7"),
        ("Conv > Add | Transpose", "Conv#5 Add#6 Transpose#8"),
        ("Add > (Relu | Transpose)* > LeakyRelu", "Add#6 Relu#7 Transpose#8 LeakyRelu#9"),
        ("Conv[group=1] > Clip", "Conv#3 Clip#4"),
        ("Conv[group=2]", ""),
        ("LeakyRelu[alpha=0.1]", "LeakyRelu#9"),
        ("Transpose[perm=[0,2,3,1]]", "Transpose#8"),
        ("Add > * > Transpose", "Add#6 Relu#7 Transpose#8"),
        ("Rel?#*", "Relu#2 Relu#7"),
    ],
)
def test_nodes_on_matches_of_an_expression(model, text, expected):
    assert matched_nodes(parse(text), model) == {*expected.split()}


BLOCKS = {
    "conv-relu": "c = Conv(x, w) b = BatchNormalization(c, s, s, s, s) y = Clip(b)",
    "conv-add-relu": "c = Conv(x, w) a = Add(x, c) y = Relu(a)",
    "conv-layernorm": "c = Conv(x, w) t = Transpose(c) i = Identity(t) y = LayerNormalization(i, s)",
    "matmul-gelu": "m = MatMul(x, w) a = Add(m, s) d = Div(a, s) e = Erf(d) p = Add(e, s) q = Mul(a, p) y = Mul(q, s)",
    "attention": "m = MatMul(x, x) d = Div(m, s) p = Softmax(d) y = MatMul(p, x)",
}


def one_block(body: str) -> Model:
    return parsed(f"g (float[1,4,4,4] x, float[4,4,1,1] w, float[4] s) => (float y) {{ {body} }}")


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_matches_the_block_it_is_named_after_and_no_other(name):
    for other, body in BLOCKS.items():
        block = one_block(body)
        assert matched_nodes(parse(name), block) == (
            {node.name for node in block.nodes} if other == name else set()
        )


def test_only_data_edges_are_followed():
    scale = one_block("c = Conv(x, w) r = Reshape(c, n) y = LayerNormalization(x, r)")
    assert matched_nodes(parse("Conv > Reshape"), scale)
    assert not matched_nodes(parse("conv-layernorm"), scale)
    shape = one_block("c = Conv(x, w) n = Shape(c) y = Reshape(x, n)")
    assert not matched_nodes(parse("Conv > Shape > Reshape"), shape)


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("Conv > Rellu", 8, "unknown operator 'Rellu' (did you mean 'Relu'?)"),
        ("conv-rel", 1, "unknown operator 'conv-rel' (did you mean 'conv-relu'?)"),
        ("Conv >", 7, "expected an operator"),
        ("(Conv | Relu", 1, "this parenthesis is never closed"),
        ("Conv ) Relu", 6, "did not expect ')' here"),
        ("Conv[group]", 11, "expected '=' and a value, not ']'"),
        ("Conv & Relu", 6, "did not expect '&' here"),
        ("", 1, "expected an operator"),
        ("(" * 60 + "Conv" + ")" * 60, 51, "more than 50 parentheses inside each other"),
        ("Conv > " * 400 + "Conv", 2000, "longer than 2000 characters"),
    ],
)
def test_the_error_of_an_invalid_expression_marks_the_position(text, column, what):
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert isinstance(caught.value, SpecError)
    assert caught.value.column == column
    assert caught.value.what.startswith(what)
    assert str(caught.value).splitlines()[-1] == "  " + " " * (column - 1) + "^"


def test_allowed_nodes_combine_all_rules_and_unmatched_ones_are_reported(model):
    def names(**rules: tuple[str, ...]) -> list[str]:
        return sorted(select_nodes(model, PatternRules(**rules)).allowed)

    assert len(names()) == 10
    assert names(allow=("Conv",)) == ["Conv#0", "Conv#3", "Conv#5"]
    assert names(allow=("Conv", "Transpose"), deny=("Conv > Clip",)) == ["Conv#0", "Conv#5", "Transpose#8"]
    assert names(allow=("Conv",), exclude=("*#0",)) == ["Conv#3", "Conv#5"]
    assert names(include=("Relu*", "Clip*"), deny=("Clip",)) == ["Relu#2", "Relu#7"]
    rules = PatternRules(allow=("Conv", "Gemm"), deny=("Softmax",), include=("*",), exclude=("/head/*",))
    assert select_nodes(model, rules).unmatched == ("Gemm", "Softmax", "/head/*")


EMPTY_RULES = [
    ({"include": "Conv"}, "'Conv' is the name of no node", "it is an operator type: write it under patterns.allow"),
    ({"include": "Rleu#2"}, "'Rleu#2' is the name of no node (did you mean 'Relu#2'?)", "globs over node names"),
    ({"include": "/layer9/*"}, "'/layer9/*' is the name of no node", "globs over node names"),
    ({"include": "relu*"}, "'relu*' is the name of no node", "globs over node names"),
    ({"allow": "Gemm"}, "nothing in patterns.allow matches a node: Gemm", "Clip, Conv"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message", "cure"), EMPTY_RULES)
def test_rules_that_would_allow_no_node_are_an_error(model, rules, message, cure):
    """Otherwise the model would stay unchanged without a reason."""
    select_nodes(model, PatternRules(allow=("Conv", "Gemm"), include=("Relu*",), exclude=("/head/*",)))
    with pytest.raises(SpecError) as caught:
        select_nodes(model, PatternRules(**{rule: (text,) for rule, text in rules.items()}))
    assert message in caught.value.what
    assert cure in str(caught.value.cure)


def test_matching_of_nested_repeats_terminates(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    nested = parse("(*|*)* > (*|*)* > Softmax")
    before = {node.name for node in model.nodes if node.op_type not in ("Constant", "Concat")}
    assert len(matched_nodes(nested, model)) > len(before) / 2
