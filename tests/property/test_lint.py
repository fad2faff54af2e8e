"""Lint accepts any model with pairs, including models without meaning."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from random_models import MODES, placed_models, quantized_model

from qdqspec._core.hooks import all_names
from qdqspec.graph.model import Model
from qdqspec.graph.protos import copied
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.qdq.lint.rules import render_findings

TARGETS = all_names("lint_targets")
STORED = [name for name, fmt in FORMATS.items() if name != BIAS_FORMAT and not fmt.at_run_time]
HELD = [name for name, fmt in FORMATS.items() if name != BIAS_FORMAT and not fmt.block]


@given(target=st.sampled_from(TARGETS), drawn=placed_models(activations=HELD, weights=STORED), mode=MODES)
def test_lint_of_any_quantized_model_is_deterministic_and_uses_known_rules(target, drawn, mode) -> None:
    model, placement = drawn
    quantized = quantized_model(model, placement, mode)
    found = lint_model(quantized, target)
    assert found == lint_model(quantized, target)
    assert {finding.id for finding in found} <= {rule.id for rule in rules_for(target)}
    assert {finding.node for finding in found} <= {"", *quantized.by_name}
    assert render_findings(target, found)


# ---- models that pass ONNX's checker but have no meaning -----------------------------------------

DATA = Path(__file__).parents[1] / "data"
QUANTIZED = sorted(path.name for path in DATA.glob("*.onnx"))
OTHERS = (
    "Add", "Concat", "Gelu", "Gemm", "GlobalAveragePool", "MatMul", "Mul", "Pad", "Sigmoid", "Softmax", "Split",
)  # fmt: skip


@functools.cache
def loaded(name: str) -> onnx.ModelProto:
    return onnx.load(DATA / name)


@st.composite
def miswired(draw: st.DrawFn) -> onnx.ModelProto:
    """A quantized model in which inputs or operators of some nodes are replaced at random."""
    proto = copied(loaded(draw(st.sampled_from(QUANTIZED))))
    nodes = proto.graph.node
    tensors = [name for node in nodes for name in (*node.input, *node.output)]
    operators = st.sampled_from((*OTHERS, "QuantizeLinear", "DequantizeLinear", "Conv"))
    for _ in range(draw(st.integers(1, 6))):
        node = nodes[draw(st.integers(0, len(nodes) - 1))]
        index = draw(st.integers(0, max(len(node.input) - 1, 0)))
        match draw(st.sampled_from(("read", "nothing", "less", "operator"))):
            case "read" if node.input:
                node.input[index] = draw(st.sampled_from(tensors))
            case "nothing" if node.input:
                node.input[index] = ""
            case "less" if node.input:
                node.input.pop()
            case _:
                node.op_type = draw(operators)
    return proto


@settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)  # most of these models are not valid
@given(target=st.sampled_from(TARGETS), proto=miswired())
def test_lint_of_a_miswired_model_raises_no_error(target: str, proto: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError:
        assume(False)
    lint_model(Model(proto), target)
