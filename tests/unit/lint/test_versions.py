"""Rules by version: the same small model on both sides of each version limit, and findings without a source."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from packaging.version import Version
from trt_corpus import parse

from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.types import Finding

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


def test_every_version_limit_has_a_model() -> None:
    edges = {name: {Version(holds), Version(other)} for name, *_, holds, other in EDGES}
    for rule in rules_for("tensorrt-10"):
        bounds = {Version(bound) for bound in (rule.since, rule.until) if bound}
        assert bounds <= edges.get(rule.id, set()), rule.id


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
