"""Figures of parity beside the SQNR of outputs, of cases that ONNX Runtime runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqspec.app.session import Session
from qdqspec.spec.kinds import params_of
from qdqspec.types import (
    Case,
    CheckSpec,
    Inputs,
    QuantizeRules,
    TuneRules,
)


def coverage_case(model: Path, data: Path, **limits: float) -> Case:
    """A case whose selected model has all pairs that its limits allow, without timing."""
    limits = {"min_sqnr_db": 20, **limits}
    params = params_of("parity").model_validate({"kind": "parity", **limits})
    return Case(
        id="default",
        model=model,
        inputs=Inputs(calibration=data),
        quantize=QuantizeRules(outputs=True),
        tune=TuneRules(objective="coverage", trials=3),
        checks=(CheckSpec(id="parity", kind="parity", params=params),),
    )


@pytest.fixture
def heads(tmp_path: Path) -> tuple[Path, Path]:
    """One convolution whose output has four channels of hundreds and two channels below one, and data for it."""
    random = np.random.default_rng(3)
    sizes = np.float32([300] * 4 + [0.3] * 2).reshape(6, 1, 1, 1)
    weight = (random.normal(size=(6, 16, 3, 3)) / 12).astype(np.float32) * sizes
    text = """<ir_version: 9, opset_import: ["": 17]>
        net (float[1,16,16,16] x) => (float[1,6,16,16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "heads.onnx")
    np.savez(tmp_path / "data.npz", x=random.normal(size=(16, 16, 16, 16)).astype(np.float32))
    return tmp_path / "heads.onnx", tmp_path / "data.npz"


def test_a_case_notes_a_slice_far_below_its_output(heads: tuple[Path, Path], tmp_path: Path) -> None:
    case = coverage_case(*heads)
    with Session(root=tmp_path, backend="onnxruntime") as session:
        assert session.judge(case, case.checks[0]).verdict.outcome == "pass"
        evidence = session.work(case).record.evidence
    (found,) = evidence.parity.outputs
    assert found.sqnr_db > 30
    worst = found.far_slice()
    assert worst.axis == 1
    assert worst.index in (4, 5)
    (noted,) = [line for line in evidence.warnings if "slice" in line]
    assert f"slice {worst.index} of axis 1" in noted


def test_a_case_with_a_limit_on_slices_fails_without_a_note(heads: tuple[Path, Path], tmp_path: Path) -> None:
    case = coverage_case(*heads, min_slice_sqnr_db=10)
    with Session(root=tmp_path, backend="onnxruntime") as session:
        assert session.judge(case, case.checks[0]).verdict.outcome == "fail"
        warnings = session.work(case).record.evidence.warnings
    assert not any("slice" in line for line in warnings)
