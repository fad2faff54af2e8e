"""Searches of models whose outputs have a length that depends on their values, as of decoders and detectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import written_case

from qdqspec.app.session import Session
from qdqspec.types import Case, TuneRules

COMPRESSED = """net (float[1,16] x) => (float[n,16] y) {
  a = MatMul(x, w)  b = Relu(a)  c = MatMul(b, v)  d = Reshape(c, rows)
  e = ReduceMax<axes = [1], keepdims = 0>(d)  f = Greater(e, least)  y = Compress<axis = 0>(d, f) }"""
ROWS = 64  # some of their maxima are so close to the limit that quantized weights change their number


@pytest.fixture
def case(tmp_path: Path) -> Case:
    random = np.random.default_rng(0)
    shapes = {"w": (16, 32), "v": (32, 16 * ROWS)}
    constants = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    constants |= {"rows": np.array([ROWS, 16]), "least": np.float32(1.5)}
    samples = [random.normal(size=(16, 1, 16)).astype(np.float32) for _ in range(2)]
    case = written_case(tmp_path, COMPRESSED, {"x": samples[0]}, TuneRules(trials=4), **constants)
    np.savez(tmp_path / "evaluation.npz", x=samples[1])
    return replace(case, inputs=replace(case.inputs, evaluation=tmp_path / "evaluation.npz"))


def test_placements_whose_outputs_have_another_length_are_not_built(tmp_path: Path, case: Case) -> None:
    with Session(root=tmp_path / "out", no_cache=True) as session:
        found = session.search(case)
    assert found.unchanged
    assert "expected below 20 dB and not built" in found.reason
    searched = [trial for trial in found.trials if trial.phase != "confirm"]
    assert [trial.placement.sites for trial in searched] == [frozenset()]
    assert not found.corrections  # which are judged on everything quantized
