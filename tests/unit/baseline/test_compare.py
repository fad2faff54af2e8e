"""Differences that make a baseline incomparable, and differences that are only reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from baseline_entries import entry_of

from qdqspec.checks.baselines import Conditions, differences, rules_of, why_incomparable
from qdqspec.types import (
    Case,
    Inputs,
    InputShape,
    PatternRules,
    QuantizeRules,
    ShapeProfile,
    TuneRules,
)

CASE = Case(id="default", model=Path("/m.onnx"))
NOW = Conditions(
    clock="cpu",
    model_sha256="a" * 64,
    rules=rules_of(CASE),
    scheme="0123",
    environment={"onnxruntime": "1.31.1", "cpu": "Sample"},
)
ENTRY = entry_of(1, clock="cpu", rules=dict(NOW.rules), environment=dict(NOW.environment))


def with_case(**fields: object) -> Conditions:
    return replace(NOW, rules=rules_of(replace(CASE, **fields)))


SHAPE = InputShape(min=(1, 3), opt=(8, 3), max=(8, 3))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(NOW, model_sha256="b" * 64), "model was aaaaaaaaaaaa, is bbbbbbbbbbbb"),
        (replace(NOW, clock="wall"), "clock was cpu, is wall"),
        (with_case(quantize=QuantizeRules(format="fp8")), "quantize.format was int8, is fp8"),
        (with_case(patterns=PatternRules(deny=("Softmax",))), "patterns.deny was empty, is Softmax"),
        (with_case(tune=TuneRules(min_sqnr_db=30.0)), "tune.min_sqnr_db was 20.0, is 30.0"),
        (with_case(inputs=Inputs(batch=8)), "inputs.batch was unset, is 8"),
        (with_case(inputs=Inputs(profiles=(ShapeProfile(shapes={"x": SHAPE}),))), "inputs.shapes was"),
    ],
)
def test_other_conditions_are_refused_with_the_reason(now: Conditions, words: str) -> None:
    assert words in why_incomparable(ENTRY, now)


@pytest.mark.parametrize(
    "now",
    [
        with_case(tune=TuneRules(trials=3), title="another title"),
        replace(NOW, rules={**NOW.rules, "quantize.rounding": "even"}),  # missing in an older entry
    ],
)
def test_conditions_without_effect_on_the_ratio_are_no_difference(now: Conditions) -> None:
    assert why_incomparable(ENTRY, now) == ""
    assert differences(ENTRY, now) == ()


def test_a_changed_environment_is_reported_but_not_refused() -> None:
    environment = {"onnxruntime": "1.31.2", "cpu": "Sample", "python": "3.12"}
    now = replace(NOW, scheme="4567", environment=environment)
    assert why_incomparable(ENTRY, now) == ""
    assert differences(ENTRY, now) == (
        "placement: was 0123, is 4567",
        "onnxruntime: was 1.31.1, is 1.31.2",
        "python: was unknown, is 3.12",
    )
