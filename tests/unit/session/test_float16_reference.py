"""The float16 reference is timed and recorded if useful, and never selected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from sessions import Open

from qdqspec.app.report.record import case_to_json
from qdqspec.app.session import Session
from qdqspec.backends.onnxruntime.optimize import half_model
from qdqspec.graph.model import load_model
from qdqspec.graph.reference import reference_outputs
from qdqspec.types import Case, CaseRecord, TuneRules

EVIDENCE = frozenset({"latency", "parity"})


@pytest.fixture
def model(project: Path) -> Path:
    return project / "chain.onnx"


@pytest.fixture
def session(open_session: Open) -> Session:
    return open_session()


def case_of(model: Path, **rules: bool) -> Case:
    return Case(id="default", model=model, tune=TuneRules(trials=4, **rules))


@pytest.mark.parametrize(
    ("computes", "asked", "timed"),
    [(False, True, True), (True, None, True), (True, False, False), (False, None, False)],
)
def test_the_float16_reference_is_timed_on_request_or_if_the_backend_computes_in_float16(
    session: Session,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    computes: bool,
    asked: bool | None,
    timed: bool,
) -> None:
    known = session.runtime().backend.capabilities(session.runtime().options)
    able = replace(known, computes_in_half=computes)
    monkeypatch.setattr(session.runtime().backend, "capabilities", lambda *_: able)
    evidence = session.evidence(case_of(model, **({} if asked is None else {"float16": asked})), EVIDENCE)
    assert ("float16" in evidence.latency.samples) == timed
    recorded = case_to_json(CaseRecord(evidence=evidence))
    assert ("float16" in {other["role"] for other in recorded["others"]}) == timed
    notes = [warning for warning in evidence.warnings if "few float16 kernels" in warning]
    assert len(notes) == (timed and not computes)


def test_a_float16_model_has_no_separate_float16_reference(session: Session, model: Path) -> None:
    half = half_model(load_model(model), model)
    onnx.save(half, model.with_name("half.onnx"))
    evidence = session.evidence(case_of(model.with_name("half.onnx"), float16=True), EVIDENCE)
    assert "float16" not in evidence.latency.samples


def test_the_float16_reference_has_float32_inputs_and_similar_outputs(model: Path, tmp_path: Path) -> None:
    proto = half_model(load_model(model), model, keep_io=True)
    path = tmp_path / "half.onnx"
    onnx.save(proto, path)
    onnx.checker.check_model(str(path), full_check=True)
    assert {tensor.data_type for tensor in proto.graph.initializer} == {TensorProto.FLOAT16}
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 8, 12, 12)).astype(np.float32)}
    expected, found = (reference_outputs(file, feeds)["y"] for file in (model, path))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())
    assert not np.array_equal(found, expected)
