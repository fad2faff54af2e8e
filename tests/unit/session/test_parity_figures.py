"""Figures of parity beside the SQNR of outputs, of cases that ONNX Runtime runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import check_of, normal, written_case

from qdqspec.app.session import Session
from qdqspec.types import Case, Evidence, QuantizeRules, TuneRules


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """One convolution whose output has four channels of hundreds and two channels below one; all pairs are selected."""
    sizes = np.float32([300] * 4 + [0.3] * 2).reshape(6, 1, 1, 1)
    text = "net (float[1,16,16,16] x) => (float[1,6,16,16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    rules, weight = TuneRules(objective="coverage", trials=3), normal(6, 16, 3, 3, deviation=1 / 12) * sizes
    case = written_case(tmp_path, text, {"x": normal(16, 16, 16, 16, seed=1)}, rules, w=weight)
    return replace(case, quantize=QuantizeRules(outputs=True))


def judged(case: Case, folder: Path, **limits: float) -> tuple[str, Evidence]:
    check = check_of("parity", min_sqnr_db=20, **limits)
    case = replace(case, checks=(check,))
    with Session(root=folder, backend="onnxruntime") as session:
        outcome = session.judge(case, check).verdict.outcome
        return outcome, session.work(case).record.evidence


def test_a_case_notes_a_slice_far_below_its_output_unless_it_has_a_limit(case: Case, tmp_path: Path) -> None:
    outcome, evidence = judged(case, tmp_path)
    assert outcome == "pass"
    (found,) = evidence.parity.outputs
    assert found.sqnr_db > 30
    worst = found.far_slice()
    assert worst.axis == 1
    assert worst.index in (4, 5)
    (noted,) = [line for line in evidence.warnings if "slice" in line]
    assert f"slice {worst.index} of axis 1" in noted
    outcome, evidence = judged(case, tmp_path, min_slice_sqnr_db=10)
    assert outcome == "fail"
    assert not any("slice" in line for line in evidence.warnings)
