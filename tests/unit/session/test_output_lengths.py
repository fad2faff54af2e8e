"""Searches of models whose outputs have a length that depends on their values, as of decoders and detectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, TuneRules

COMPRESSED = """<ir_version: 8, opset_import: ["": 17]> net (float[1,16] x) => (float[n,16] y) {
  a = MatMul(x, w)  b = Relu(a)  c = MatMul(b, v)  d = Reshape(c, rows)
  e = ReduceMax<axes = [1], keepdims = 0>(d)  f = Greater(e, least)  y = Compress<axis = 0>(d, f) }"""
ROWS = 64  # some of their maxima are so close to the limit that quantized weights change their number


@pytest.fixture
def case(tmp_path: Path) -> Case:
    proto, random = onnx.parser.parse_model(COMPRESSED), np.random.default_rng(0)
    constants = {
        "w": random.normal(0, 0.3, (16, 32)).astype(np.float32),
        "v": random.normal(0, 0.3, (32, 16 * ROWS)).astype(np.float32),
        "rows": np.array([ROWS, 16], np.int64),
        "least": np.array(1.5, np.float32),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in constants.items())
    onnx.save(proto, tmp_path / "net.onnx")
    for name in ("calibration", "evaluation"):
        np.savez(tmp_path / f"{name}.npz", x=random.normal(size=(16, 1, 16)).astype(np.float32))
    data = Inputs(calibration=tmp_path / "calibration.npz", evaluation=tmp_path / "evaluation.npz")
    return Case(id="default", model=tmp_path / "net.onnx", inputs=data, tune=TuneRules(trials=4))


def test_placements_whose_outputs_have_another_length_are_not_built(tmp_path: Path, case: Case) -> None:
    with Session(root=tmp_path / "out", no_cache=True) as session:
        found = session.search(case)
    assert found.unchanged
    assert "expected below 20 dB and not built" in found.reason
    searched = [trial for trial in found.trials if trial.phase != "confirm"]
    assert [trial.placement.sites for trial in searched] == [frozenset()]
    assert not found.corrections  # which are judged on everything quantized
