"""`benchmarks/audit.py` finds no fault in the checks of a small real model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_audit_of_a_real_model_has_no_fault(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    audit = importlib.import_module("audit")
    results = dict(
        zip(audit.STEPS, [*audit.row(models / "digits_resnet.onnx", 1, {})][-len(audit.STEPS) :], strict=True)
    )
    assert {
        step: text for step, text in results.items() if text != audit.NOTHING and not text.endswith("ok")
    } == {}
    assert results["strips"] == audit.OK
