"""Each lint rule for TensorRT: a model that breaks it, and a similar one that does not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from trt_corpus import (
    BY_FOUR,
    CASES,
    COMES,
    CONV,
    F32,
    FP8,
    IMAGE,
    NEAR_MISSES,
    NEWER,
    QX,
    ROWS,
    Case,
    four,
    parse,
)

from qdqspec.backends.tensorrt.lint.rule import TARGETS
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.types import LintTarget


def ids(model: Model, target: LintTarget = "tensorrt-11", **options: tuple[int, int] | None) -> set[str]:
    return {finding.id for finding in lint_model(model, target, **options)}


# Rules that apply to no version 11, each with a version to which it applies.
OLD = dict.fromkeys(("TRT003", "TRT009", "TRT014", "TRT023", "TRT026", "TRT027"), "tensorrt-10.12")


@pytest.mark.parametrize("name", CASES)
def test_one_model_breaks_the_rule_and_a_similar_one_does_not(name: str) -> None:
    (inputs, nodes, constants), good = CASES[name]
    target, opset = OLD.get(name, "tensorrt-11"), NEWER.get(name, 21)
    assert name in ids(parse(inputs, "y", nodes, opset, **constants), target)
    inputs, nodes, constants = good
    assert name not in ids(parse(inputs, "y", nodes, opset, **constants), target)


@pytest.mark.parametrize(("name", "broken", "case"), NEAR_MISSES)
def test_rules_at_the_limits_of_their_conditions(name: str, broken: bool, case: Case) -> None:
    inputs, nodes, constants = case
    opset = 20 if "Gelu" in nodes else 21
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
    ("dtype", "since"),
    [(ml_dtypes.float8_e4m3fn, 19), (ml_dtypes.float4_e2m1fn, 23), (np.int8, 13)],
)
def test_formats_newer_than_the_opset_of_the_model_are_reported(dtype: type, since: int) -> None:
    """ONNX's checker accepts such models."""
    older, enough = (
        parse(ROWS, "y", QX + "y = Transpose(a)", opset, z=np.zeros((), dtype))
        for opset in (since - 1, since)
    )
    assert ("TRT017" in ids(older)) == (dtype is not np.int8)
    assert "TRT017" not in ids(enough)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ([0.1, np.inf], "has 1 of 2 such scales"),
        ([-1, 0], "has 2 of 2 such scales"), ([], "has an empty scale"),
    ],
)  # fmt: skip
def test_scales_that_are_not_positive_and_finite_are_reported(scale: list[float], said: str) -> None:
    model = parse("float[4,2] x", "y", QX + "y = Transpose(a)", s=np.array(scale, F32))
    (found,) = [f for f in lint_model(model, "tensorrt-11") if f.id == "TRT002"]
    assert found.message == said


FP8_OPERATORS = "q = trt.TRT_FP8QuantizeLinear(x, s)  a = trt.TRT_FP8DequantizeLinear(q, s)  y = Tanh(a)"
PRODUCT = QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)"
BLOCKS = parse("float[2,64] x", "y", COMES + "y = Neg(a)")


@pytest.mark.parametrize(
    ("model", "name", "broken", "kept"),
    [
        pytest.param(parse(ROWS, "y", QX + "y = Neg(a)", **FP8), "TRT020", [(8, 6)], [(8, 9)], id="fp8"),
        pytest.param(parse(ROWS, "y", FP8_OPERATORS), "TRT020", [(8, 6)], [(8, 9)], id="fp8 operators"),
        pytest.param(parse(ROWS, "y", FP8_OPERATORS), "TRT021", [None], [(8, 9)], id="fp8, any GPU"),
        pytest.param(parse(ROWS, "y", QX + "y = Neg(a)"), "TRT022", [(7, 5)], [(8, 0), None], id="int8"),
        pytest.param(BLOCKS, "TRT020", [(9, 0), (12, 0)], [(10, 0)], id="activations in blocks"),
        pytest.param(parse(ROWS, "y", PRODUCT), "TRT067", [(7, 5)], [(8, 0), None], id="float product"),
        pytest.param(parse(IMAGE, "y", CONV + "y = Neg(c)"), "TRT067", [], [(7, 5)], id="convolution"),
    ],
)
def test_findings_depend_on_the_compute_capability(
    model: Model, name: str, broken: list[tuple[int, int]], kept: list[tuple[int, int]]
) -> None:
    for capability in (*broken, *kept):
        assert (name in ids(model, compute_capability=capability)) == (capability in broken), capability


def test_every_rule_has_a_model() -> None:
    elsewhere = {f"TRT0{n:02}" for n in (9, 17, 19, 20, 22, 23, 26, 27, 28, 67)}
    assert {rule.id for rule in rules_for() if rule.targets == TARGETS} == CASES.keys() | elsewhere


@pytest.mark.parametrize(
    ("inputs", "name", "broken"),
    [("float[4,128] x", "TRT064", False), ("float[2,4,128] x", "TRT064", True)],
)
def test_int8_data_of_two_dimensions_may_be_multiplied_by_four_bits(
    inputs: str, name: str, broken: bool
) -> None:
    text = QX + "p = Identity(a) " + BY_FOUR
    assert (name in ids(parse(inputs, "y", text, **four(128, 64)))) == broken
    assert name in ids(parse(inputs, "y", text, **four(128, 64), **FP8))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("2,3,4,64", "mxfp8 activations are quantized in 2 or 3 dimensions, and it has 4"),
        ("2,48", "mxfp8 comes in whole blocks of 32, and its last dimension is 48"),
        ("2,K", "mxfp8 comes in whole blocks of 32, and its last dimension is not known"),
    ],
)
def test_activations_that_cannot_be_in_blocks_are_reported_with_the_reason(shape: str, said: str) -> None:
    model = parse(f"float[{shape}] x", "y", COMES + "y = Neg(a)")
    (found,) = [f for f in lint_model(model, "tensorrt-11") if f.id == "TRT060"]
    assert found.message == f"quantizes 'x': {said}"
