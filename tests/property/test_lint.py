"""Lint judges any model with pairs in it, and never falls over one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.graph.model import Model
from qdqspec.lint import lint_model, rules_for
from qdqspec.lint.rules import TARGETS
from qdqspec.lint.text import render_findings
from qdqspec.placement.insert import insert_qdq
from qdqspec.quantize.formats import BIAS_FORMAT, FORMATS
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.testing.graphs import onnx_models, placements, ranges_for
from qdqspec.types import Placement

STORED = [name for name in FORMATS if name != BIAS_FORMAT]
HELD = [name for name in STORED if not FORMATS[name].block]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Model, Placement]:
    model = Model(draw(onnx_models(repeated_names=True)))
    return model, draw(placements(model, activations=HELD, weights=STORED))


@pytest.mark.parametrize("target", TARGETS)
@given(drawn=placed(), mode=st.sampled_from(("integer", "float")))
def test_any_model_is_judged(target: str, drawn: tuple[Model, Placement], mode: str) -> None:
    model, placement = drawn
    quantized = Model(insert_qdq(model, placement, Quantizer(model, ranges_for(model)), weights=mode).proto)
    found = lint_model(quantized, target)
    assert found == lint_model(quantized, target)
    assert {finding.id for finding in found} <= {rule.id for rule in rules_for(target)}
    assert {finding.node for finding in found} <= {"", *quantized.by_name}
    assert render_findings(target, found)


@pytest.mark.parametrize("target", TARGETS)
@given(onnx_models(repeated_names=True))
def test_what_has_no_pairs_has_no_findings(target: str, proto) -> None:
    assert lint_model(Model(proto), target) == ()
