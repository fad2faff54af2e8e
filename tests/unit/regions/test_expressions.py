"""Pattern expressions: their matches, and the errors of invalid ones."""

from __future__ import annotations

import pytest
from onnx_text import parsed

from qdqspec.errors import PatternError, SpecError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.expressions import (
    BUILT_INS,
    allowed_nodes,
    matched_nodes,
    parse,
    require_matches,
    unmatched,
)
from qdqspec.types import PatternRules
from tests.support.patterns import matches

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
        ("Transpose", ["Transpose#8"]),
        ("Conv > Relu", []),
        (
            "Conv > BatchNormalization? > (Relu|Clip)?",
            ["Conv#0 BatchNormalization#1 Relu#2", "Conv#3 Clip#4", "Conv#5"],
        ),
        ("conv-add-relu", ["Conv#5 Add#6 Relu#7"]),
        ("Conv > Add | Transpose", ["Conv#5 Add#6", "Transpose#8"]),
        ("Add > (Relu | Transpose)* > LeakyRelu", ["Add#6 Relu#7 Transpose#8 LeakyRelu#9"]),
        ("Conv[group=1] > Clip", ["Conv#3 Clip#4"]),
        ("Conv[group=2]", []),
        ("LeakyRelu[alpha=0.1]", ["LeakyRelu#9"]),
        ("Transpose[perm=[0,2,3,1]]", ["Transpose#8"]),
        ("Add > * > Transpose", ["Add#6 Relu#7 Transpose#8"]),
        ("Rel?#*", ["Relu#2", "Relu#7"]),
    ],
)
def test_matches_of_an_expression(model, text, expected):
    assert [" ".join(match) for match in matches(parse(text), model)] == expected


BLOCKS = {
    "conv-relu": "c = Conv(x, w) b = BatchNormalization(c, s, s, s, s) y = Clip(b)",
    "conv-add-relu": "c = Conv(x, w) a = Add(x, c) y = Relu(a)",
    "conv-layernorm": "c = Conv(x, w) t = Transpose(c) i = Identity(t) y = LayerNormalization(i, s)",
    "matmul-gelu": "m = MatMul(x, w) a = Add(m, s) d = Div(a, s) e = Erf(d) p = Add(e, s) q = Mul(a, p) y = Mul(q, s)",
    "attention": "k = Transpose(x) m = MatMul(x, k) d = Div(m, s) p = Softmax(d) y = MatMul(p, x)",
}
MATCHED = {
    "conv-relu": "Conv#0 BatchNormalization#1 Clip#2",
    "conv-add-relu": "Conv#0 Add#1 Relu#2",
    "conv-layernorm": "Conv#0 Transpose#1 Identity#2 LayerNormalization#3",
    "matmul-gelu": "MatMul#0 Add#1 Div#2 Erf#3 Add#4 Mul#5 Mul#6",
    "attention": "MatMul#1 Div#2 Softmax#3 MatMul#4",
}


def block(body: str) -> Model:
    return parsed(f"g (float[1,4,4,4] x, float[4,4,1,1] w, float[4] s) => (float y) {{ {body} }}")


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_matches_the_block_it_is_named_after_and_no_other(name):
    found = {other: matches(parse(name), block(body)) for other, body in BLOCKS.items()}
    assert {other: [" ".join(match) for match in some] for other, some in found.items() if some} == {
        name: [MATCHED[name]]
    }


def test_only_data_edges_are_followed():
    scale = block("c = Conv(x, w) r = Reshape(c, n) y = LayerNormalization(x, r)")
    assert matches(parse("Conv > Reshape"), scale)
    assert not matches(parse("conv-layernorm"), scale)
    assert not matches(
        parse("Conv > Shape > Reshape"), block("c = Conv(x, w) n = Shape(c) y = Reshape(x, n)")
    )


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


def test_allowed_nodes_combine_all_rules(model):
    def names(**rules: tuple[str, ...]) -> list[str]:
        return sorted(allowed_nodes(model, PatternRules(**rules)))

    assert len(names()) == 10
    assert names(allow=("Conv",)) == ["Conv#0", "Conv#3", "Conv#5"]
    assert names(allow=("Conv", "Transpose"), deny=("Conv > Clip",)) == ["Conv#0", "Conv#5", "Transpose#8"]
    assert names(allow=("Conv",), exclude=("*#0",)) == ["Conv#3", "Conv#5"]
    assert names(include=("Relu*", "Clip*"), deny=("Clip",)) == ["Relu#2", "Relu#7"]
    assert names(include=("relu*",)) == []


def test_unmatched_rules_are_reported_with_their_text(model):
    rules = PatternRules(allow=("Conv", "Gemm"), deny=("Softmax",), include=("*",), exclude=("/head/*",))
    assert unmatched(model, rules) == ("Gemm", "Softmax", "/head/*")


@pytest.mark.parametrize(
    ("glob", "message", "cure"),
    [
        ("Conv", "'Conv' is the name of no node", "it is an operator type: write it under patterns.allow"),
        ("Rleu#2", "'Rleu#2' is the name of no node (did you mean 'Relu#2'?)", "globs over node names"),
        ("/layer9/*", "'/layer9/*' is the name of no node", "globs over node names"),
    ],
)
def test_an_included_name_that_matches_nothing_is_an_error(model, glob, message, cure):
    """Otherwise the model would stay unchanged without a reason."""
    require_matches(model, PatternRules(include=("Relu*",), exclude=("/head/*",)))
    with pytest.raises(SpecError) as caught:
        require_matches(model, PatternRules(include=("Relu*", glob)))
    assert message in caught.value.what
    assert cure in str(caught.value.cure)


def test_an_absent_operator_is_allowed_beside_a_present_one_and_not_alone(model):
    require_matches(model, PatternRules(allow=("Conv", "Gemm")))
    with pytest.raises(SpecError, match="Gemm, MatMul") as caught:
        require_matches(model, PatternRules(allow=("Gemm", "MatMul")))
    assert "Clip, Conv" in str(caught.value.cure)


def test_matching_of_nested_repeats_terminates(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    nested = parse("(*|*)* > (*|*)* > Softmax")
    assert matches(nested, model)
    before = {node.name for node in model.nodes if node.op_type not in ("Constant", "Concat")}
    assert len(matched_nodes(nested, model)) > len(before) / 2
