"""Each lint rule for TensorRT and TensorRT for RTX: a model that breaks it, and a similar one that does not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from trt_corpus import (
    BY_FOUR,
    CASES,
    COMES,
    CONV,
    F32,
    FP8,
    IMAGE,
    IMPORTED,
    NEAR_MISSES,
    NEWER,
    QX,
    ROWS,
    RTX_CASES,
    Case,
    four,
    parse,
    two,
)

from qdqspec.backends.tensorrt.lint.rule import TARGETS
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.qdq.lint.rules import ALL
from qdqspec.types import Finding, LintTarget

RTX: LintTarget = "tensorrt-rtx-1"


def ids(model: Model, target: LintTarget = "tensorrt-11", **options: tuple[int, int] | None) -> set[str]:
    return {finding.id for finding in lint_model(model, target, **options)}


# Rules that apply to no version 11, each with a version to which it applies.
OLD = dict.fromkeys(("TRT003", "TRT009", "TRT014", "TRT023", "TRT026", "TRT027"), "tensorrt-10.12")


HELD = [rule.id for rule in rules_for(RTX) if ALL not in rule.targets]


@pytest.mark.parametrize(
    ("target", "name"),
    [(OLD.get(name, "tensorrt-11"), name) for name in CASES]
    + [(RTX, name) for name in HELD if name in CASES | RTX_CASES],
)
def test_one_model_breaks_the_rule_and_a_similar_one_does_not(target: LintTarget, name: str) -> None:
    cases = CASES | RTX_CASES if target == RTX else CASES
    for (inputs, nodes, constants), broken in zip(cases[name], (True, False), strict=True):
        model = parse(inputs, "y", nodes, NEWER.get(name, 21), **constants)
        assert (name in ids(model, target)) == broken


@pytest.mark.parametrize(("name", "broken", "case"), NEAR_MISSES)
def test_rules_at_the_limits_of_their_conditions(name: str, broken: bool, case: Case) -> None:
    inputs, nodes, constants = case
    opset = NEWER.get(name, 20 if "Gelu" in nodes else 21)
    assert (name in ids(parse(inputs, "y", nodes, opset, **constants))) == broken


def test_pairs_in_bodies_are_reported_with_their_path() -> None:
    """A branch reads weights and scales of the outer graph."""
    inner = onnx.parser.parse_graph(
        "then () => (float[4,16] b1) { [inner] g = QuantizeLinear(x, s, zu)  h = DequantizeLinear(g, s, zu) "
        " b1 = Neg(h) }"
    )
    other = onnx.parser.parse_graph("otherwise () => (float[4,16] b2) { b2 = Neg(x) }")
    model = parse(ROWS + ", bool p", "y", "k = Identity(s)  y = Neg(x)", zu=np.array(128, np.uint8))
    branch = onnx.helper.make_node("If", ["p"], ["o"], "choice", then_branch=inner, else_branch=other)
    model.proto.graph.node.append(branch)
    model.proto.graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), "zu"))
    found = lint_model(Model(model.proto), "tensorrt-11")
    assert ("TRT001", "choice/then_branch/inner") in {(finding.id, finding.node) for finding in found}
    assert {finding.node.rpartition("/")[0] for finding in found} <= {"choice/then_branch", "choice", ""}


def test_pairs_in_local_functions_are_found() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 19, "own": 1]>
        g (float[4,16] x) => (float[4,16] y) <float s = {0.1}, uint8 z = {3}> {
            [first] t = own.Pair(x, s, z)  [second] y = own.Pair(t, s, z)
        }
        <domain: "own", opset_import: ["": 19]>
        Pair (x, s, z) => (o) { [quant] q = QuantizeLinear(x, s, z)  o = DequantizeLinear(q, s, z) }"""
    )
    found = lint_model(Model(proto), "tensorrt-11")
    assert [f.node for f in found if f.id == "TRT001"] == ["first/quant", "second/quant"]
    assert len(proto.functions) == 1, "the model is not changed"


@pytest.mark.parametrize(
    ("dtype", "since"), [(ml_dtypes.float8_e4m3fn, 19), (ml_dtypes.float4_e2m1fn, 23), (np.int8, 13)]
)
def test_formats_newer_than_the_opset_of_the_model_are_reported(dtype: type, since: int) -> None:
    """ONNX's checker accepts such models."""
    older, enough = (
        parse(ROWS, "y", QX + "y = Transpose(a)", opset, z=np.zeros((), dtype))
        for opset in (since - 1, since)
    )
    assert ("TRT017" in ids(older)) == (dtype is not np.int8)
    assert "TRT017" not in ids(enough)


FP8_OPERATORS = "q = trt.TRT_FP8QuantizeLinear(x, s)  a = trt.TRT_FP8DequantizeLinear(q, s)  y = Tanh(a)"
STORED = "q = QuantizeLinear(x, s, z)  y = Cast<to = 1>(q)"
PRODUCT = QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)"
BLOCKS = parse("float[2,64] x", "y", COMES + "y = Neg(a)")


@pytest.mark.parametrize(
    ("model", "name", "broken", "kept"),
    [
        pytest.param(parse(ROWS, "y", QX + "y = Neg(a)", **FP8), "TRT020", [(8, 6)], [(8, 9)], id="fp8"),
        pytest.param(parse(ROWS, "y", STORED, **FP8), "TRT020", [(8, 6)], [(8, 9)], id="fp8, without a DQ"),
        pytest.param(parse(ROWS, "y", FP8_OPERATORS), "TRT020", [(8, 6)], [(8, 9)], id="fp8 operators"),
        pytest.param(parse(ROWS, "y", FP8_OPERATORS), "TRT021", [None], [(8, 9)], id="fp8, any GPU"),
        pytest.param(parse(ROWS, "y", QX + "y = Neg(a)"), "TRT022", [(7, 5)], [(8, 0), None], id="int8"),
        pytest.param(BLOCKS, "TRT020", [(9, 0), (12, 0)], [(10, 0)], id="activations in blocks"),
        pytest.param(parse(ROWS, "y", PRODUCT), "TRT067", [(7, 5)], [(8, 0), None], id="float product"),
        pytest.param(parse(IMAGE, "y", CONV + "y = Neg(c)"), "TRT067", [], [(7, 5)], id="convolution"),
    ],
)
def test_findings_depend_on_the_compute_capability(model, name, broken, kept) -> None:
    for capability in (*broken, *kept):
        assert (name in ids(model, compute_capability=capability)) == (capability in broken), capability


def test_every_rule_has_a_model() -> None:
    elsewhere = {f"TRT0{n:02}" for n in (9, 17, 19, 20, 22, 23, 26, 27, 28, 67)}
    assert {rule.id for rule in rules_for() if rule.targets == TARGETS} == CASES.keys() | elsewhere
    assert {*HELD} - (CASES | RTX_CASES).keys() == {"TRT020", "TRT067"}


@pytest.mark.parametrize(
    ("inputs", "name", "broken"), [("float[4,128] x", "TRT064", False), ("float[2,4,128] x", "TRT064", True)]
)
def test_int8_data_of_two_dimensions_may_be_multiplied_by_four_bits(inputs, name, broken) -> None:
    text = QX + "p = Identity(a) " + BY_FOUR
    assert (name in ids(parse(inputs, "y", text, **four(128, 64)))) == broken
    assert name in ids(parse(inputs, "y", text, **four(128, 64), **FP8))


LAST = "quantizes 'x': mxfp8 comes in whole blocks of 32, and its last dimension is"


@pytest.mark.parametrize(
    ("shape", "scale", "said"),
    [
        ("4,2", [0.1, np.inf], "has 1 of 2 such scales"),
        ("4,2", [-1, 0], "has 2 of 2 such scales"),
        ("4,2", [], "has an empty scale"),
        (
            "2,3,4,64",
            None,
            "quantizes 'x': mxfp8 activations are quantized in 2 or 3 dimensions, and it has 4",
        ),
        ("2,48", None, f"{LAST} 48"),
        ("2,K", None, f"{LAST} not known"),
    ],
)
def test_scales_and_blocks_that_cannot_be_are_reported_with_the_reason(
    shape: str, scale: list[float] | None, said: str
) -> None:
    rule, scales = ("TRT060", {}) if scale is None else ("TRT002", {"s": np.array(scale, F32)})
    model = parse(f"float[{shape}] x", "y", (COMES if scale is None else QX) + "y = Neg(a)", **scales)
    (found,) = [f for f in lint_model(model, "tensorrt-11") if f.id == rule]
    assert found.message == said


@pytest.mark.parametrize(
    ("numbers", "first"), [({}, (7, 5)), (FP8, (8, 9)), ({"z": np.zeros((), ml_dtypes.int4)}, (8, 0))]
)
def test_a_format_is_refused_below_its_compute_capability(numbers, first) -> None:
    model = parse(ROWS, "y", QX + "y = Neg(a)", **numbers)
    assert "TRT020" not in ids(model, RTX, compute_capability=first) | ids(model, RTX)
    below = (first[0], first[1] - 1) if first[1] else (first[0] - 1, 5)
    (found,) = [f for f in lint_model(model, RTX, compute_capability=below) if f.id == "TRT020"]
    assert found.severity == "refused"


@pytest.mark.parametrize("op", IMPORTED)
def test_operators_of_onnx_runtime_are_reported_if_they_need_a_plugin(op: str) -> None:
    broken, (inputs, nodes, constants) = IMPORTED[op]
    assert ids(parse(inputs, "y", nodes, **constants), RTX) == broken


# ---- rules by version: the same model on both sides of each limit ------------------------------------


F16 = np.float16
PAIR = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  "
SCALED = "q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)  y = Neg(a)"
ZEROED = "q = QuantizeLinear(x, s, t)  a = DequantizeLinear(q, s, t)  y = Neg(a)"
UNNAMED = PAIR + "v = DequantizeLinear(m, ws, wz)  y = MatMul(a, v)"
WIDE = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear<output_dtype = 10>(q, s, z)  n = Neg(a)  y = Cast<to = 1>(n)"
HALF = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear<output_dtype = 1>(q, s, z)  y = Neg(a)"
ROWS = "float[4,16] x"
HALVES = "float16[4,16] x"

# rule: inputs, nodes, opset, constants; the versions directly before and after the limit; those in which the rule
# applies
EDGES: list[tuple[str, str, str, int, dict[str, np.ndarray], str, str]] = [
    ("TRT003", ROWS + ", float t", SCALED, 21, {}, "10.12", "10.13"),
    ("TRT009", HALVES, WIDE, 23, {}, "10.12", "10.13"),
    ("TRT014", ROWS, UNNAMED, 21, {}, "10.14", "10.15"),
    ("TRT018", ROWS + ", int8 t", ZEROED, 21, {}, "10.13", "10.12"),
    ("TRT019", ROWS, HALF, 23, {"s": np.array(0.05, F16)}, "10.13", "10.12"),
    ("TRT023", ROWS, WIDE, 23, {}, "10.14", "10.15"),
    ("TRT026", "float[1,2,16,64] x, float[1,2,16,64] k", "y = Attention(x, k, k)", 23, {}, "10.13", "10.14"),
    ("TRT027", ROWS, "y = RMSNormalization(x, b)", 23, {}, "10.14", "10.15"),
    ("TRT028", ROWS, "y = Swish(x)", 24, {}, "11.0", "11.1"),
]


def found(model: Model, target: str, name: str) -> list[Finding]:
    return [finding for finding in lint_model(model, target) if finding.id == name]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge[0])
def test_a_rule_applies_on_one_side_of_its_version_limit(edge: tuple) -> None:
    name, inputs, nodes, opset, constants, holds, does_not = edge
    model = parse(inputs, "y", nodes, opset, **constants)
    assert found(model, f"tensorrt-{holds}", name)
    assert not found(model, f"tensorrt-{does_not}", name)


def test_a_major_version_has_the_findings_of_all_its_versions() -> None:
    model = parse(ROWS + ", float t", "y", SCALED)
    (finding,) = found(model, "tensorrt-10", "TRT003")
    assert finding.title == "A scale or zero point is computed when the model runs (before 10.13)"
    assert not found(model, "tensorrt-11", "TRT003")


def test_a_finding_without_a_source_for_the_version_states_that() -> None:
    model = parse(ROWS, "y", "q = QuantizeLinear(x, s, zu)  a = DequantizeLinear(q, s, zu)  y = Neg(a)")
    for target, end in (("11.1", "only"), ("11.2", "only (not known from 11.2)"), ("11", "from 11.2)")):
        assert found(model, f"tensorrt-{target}", "TRT001")[0].title.endswith(end)
    between = parse(ROWS, "y", UNNAMED)
    assert found(between, "tensorrt-10.9", "TRT014")[0].title.endswith("(not known from 10.7 before 10.15)")


def test_the_parser_casts_scales_below_opset_19() -> None:
    old, new = (parse(HALVES, "y", PAIR + "y = Neg(a)", opset) for opset in (18, 19))
    for model in (old, new):
        model.proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert not found(old, "tensorrt-10.12", "TRT009")
    assert found(new, "tensorrt-10.12", "TRT009")


def test_findings_are_sorted_by_severity() -> None:
    text = two("a", "x") + "q2 = QuantizeLinear(a, s, zu)  d = DequantizeLinear(q2, s, zu)  y = Softmax(d)"
    severities = [finding.severity for finding in lint_model(parse(ROWS, "y", text), "tensorrt-11")]
    assert severities == sorted(severities, key=("refused", "slow", "note").index)
    assert set(severities) == {"refused", "slow", "note"}
