"""Sessions with a case of several shape profiles, on ONNX Runtime and on the simulated device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arrays import arrays_of
from graph_text import kernels
from written_cases import normal, written_case

from qdqspec.app.preparation.files import CandidateFiles
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.write import format_for
from qdqspec.app.session import Session
from qdqspec.errors import StateError
from qdqspec.types import Case, InputShape, Placement, ShapeProfile, TuneRules

# Two consecutive products of the rows of a table that indices select; the number of rows is dynamic.
TEXT = """dynamic (int64[batch,rows] ids) => (float[batch,rows,64] y) {
  [gather] x = Gather(table, ids)  [matmul0] a = MatMul(x, w0)  [relu] b = Relu(a)  [matmul1] y = MatMul(b, w1) }"""


def spans(rows: int, weight: float, *, low: int = 1) -> ShapeProfile:
    shape = InputShape(min=(1, low), opt=(1, rows), max=(1, 4 * rows))
    return ShapeProfile(shapes={"ids": shape}, weight=weight)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Two profiles: few rows with weight 0.75, many rows with 0.25; the data has the shape of the first."""
    data = {"ids": np.arange(3 * 8).reshape(3, 1, 8) % 7}
    weights = {"table": normal(7, 64), **kernels(2, 64, 64)}
    case = written_case(tmp_path, TEXT, data, TuneRules(trials=3), **weights)
    return replace(case, inputs=replace(case.inputs, profiles=(spans(8, 3.0), spans(32, 1.0))))


def test_inputs_of_other_profiles_are_repetitions_of_the_data(case: Case, tmp_path: Path):
    with Session(backend="onnxruntime", root=tmp_path) as session:
        first, second = session.work(case).prepared.loads
    assert (first.name, first.share, second.name, second.share) == ("ids 1x8", 0.75, "ids 1x32", 0.25)
    given = arrays_of(tmp_path / "data.npz")["ids"][0]
    np.testing.assert_array_equal(first.feeds["ids"], given)
    np.testing.assert_array_equal(second.feeds["ids"], np.tile(given, 4))


@pytest.mark.parametrize("backend", ["onnxruntime", "fake"])
def test_every_build_is_timed_at_every_profile(case: Case, tmp_path: Path, backend: str):
    with Session(backend=backend, root=tmp_path, layout="") as session:
        result = session.tune(case)
        found = result.record.cases[0].evidence
        latency = found.latency
    assert [(p.name, p.share) for p in latency.profiles] == [("ids 1x8", 0.75), ("ids 1x32", 0.25)]
    for samples in latency.samples.values():
        assert [len(part.wall_ms) for part in samples.profiles] == [len(samples.wall_ms)] * 2
    assert all(set(p.ratios) == set(latency.samples) for p in latency.profiles)
    lines = [json.loads(line) for line in (tmp_path / "reports" / "trials.jsonl").read_text().splitlines()]
    timed = [line["samples"] for line in lines if line["samples"]["wall_ms"]]
    assert timed
    assert all(len(samples["profiles"]) == 2 for samples in timed)


def test_records_and_reports_show_each_profile(case: Case, tmp_path: Path):
    with Session(backend="fake", root=tmp_path) as session:
        record = session.tune(case).record
    data = json.loads(json.dumps(record_to_json(record)))
    again = record_from_json(data)
    assert record_to_json(again) == data
    for suffix in (".md", ".html"):
        text = str(format_for(Path(f"x{suffix}")).render(again))
        assert "reference at ids 1x8 (75%)" in text
        assert "reference at ids 1x32 (25%)" in text
        assert "weighted geometric mean of 2 shapes" in text
    data["cases"][0]["tuned"]["samples"]["profiles"].pop()
    with pytest.raises(StateError, match="tuned has samples of 1 profiles, not 2"):
        record_from_json(data)


def test_subgraphs_are_timed_at_the_first_profile(case: Case, tmp_path: Path):
    tuned = replace(case, tune=TuneRules(strategy="subgraph", trials=3))
    with Session(backend="onnxruntime", root=tmp_path) as session:
        prepared = session.work(tuned).prepared
        _, load = CandidateFiles(prepared, tmp_path).part(Placement(sites=frozenset()), ("matmul1",))
        assert (load.feeds["b"].shape, load.share) == ((1, 8, 64), 1.0)
        trials = session.search(tuned).trials
    parts = [trial for trial in trials if trial.subgraph]
    assert parts
    assert all(trial.ok for trial in parts), [trial.error for trial in parts]
