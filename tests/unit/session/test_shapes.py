"""Data of several lengths, several shape profiles, fixed inputs, and outputs whose shape is not the declared one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from onnx_text import kernels
from sessions import Open
from written_cases import normal, written_case

from qdqspec.app.preparation.files import CandidateFiles
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.write import format_for
from qdqspec.app.session import Session
from qdqspec.errors import StateError
from qdqspec.graph.model import load_model
from qdqspec.types import AccuracyRules, Case, Inputs, InputShape, Placement, ShapeProfile, TuneRules

DIM, TOKENS = 32, 40
DECODER = f"""decoder (int64[b,s] ids, float[b,past,{DIM}] past)
  => (float[b,s,{TOKENS}] logits, float[b,total,{DIM}] present) {{
  x = Gather(table, ids)  k = MatMul(x, wk)  present = Concat<axis = 1>(past, k)
  keys = Transpose<perm = [0, 2, 1]>(present)  scores = MatMul(x, keys)  p = Softmax<axis = -1>(scores)
  c = MatMul(p, present)  u = MatMul(c, wu)  a = Relu(u)  logits = MatMul(a, head) }}"""
AUDIO = """audio (float[n,1,t] x) => (float[n,10] y) {
  a = Conv<strides = [2]>(x, w1)  b = Relu(a)  c = Conv<strides = [2]>(b, w2)  d = Relu(c)
  e = ReduceMean<axes = [2], keepdims = 0>(d)  y = MatMul(e, w3) }"""


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: normal(*shape, deviation=shape[0] ** -0.5) for name, shape in shapes.items()}


def case_of(folder: Path, text: str, samples: list[dict[str, Any]], **constants: np.ndarray) -> Case:
    """A case with a file for each sample, for calibration and evaluation."""
    case, data = written_case(folder, text, {}, **constants), folder / "data"
    data.mkdir()
    for number, sample in enumerate(samples):
        np.savez(data / f"{number}.npz", **sample)
    return replace(case, inputs=Inputs(calibration=data, evaluation=data if "labels" in samples[0] else None))


def decoder(folder: Path) -> Case:
    constants = weights(table=(TOKENS, DIM), wk=(DIM, DIM), wu=(DIM, 64), head=(64, TOKENS))
    random = np.random.default_rng(1)
    lengths = [(0, 6), (0, 2), (3, 1), (9, 1), (5, 1), (20, 1)]
    samples = [
        {"ids": random.integers(0, TOKENS, (1, 1, tokens)), "past": normal(1, 1, past, DIM, seed=past)}
        for past, tokens in lengths
    ]
    return case_of(folder, DECODER, samples, **constants)


def audio(folder: Path) -> Case:
    lengths = (200, 80, 333, 120, 64, 250, 90, 170)
    samples = [  # the widest range is in the longest sample
        {"x": normal(1, 1, each, deviation=5 if each == 333 else 1, seed=each), "labels": [number]}
        for number, each in enumerate(lengths)
    ]
    return case_of(folder, AUDIO, samples, **weights(w1=(16, 1, 5), w2=(16, 16, 5), w3=(16, 10)))


@pytest.mark.parametrize("make", [decoder, audio])
def test_each_sample_is_calibrated_and_compared_in_its_own_shape(
    tmp_path: Path, open_session: Open, make: Callable[[Path], Case]
) -> None:
    quiet = open_session()
    rules = AccuracyRules(metric="top1", min=0.0) if make is audio else None
    tune = TuneRules(trials=6, min_sqnr_db=10.0, objective="coverage", accuracy=rules)
    case = replace(make(tmp_path), tune=tune)
    evidence = quiet.evidence(case, frozenset({"parity"}))
    assert not evidence.search.unchanged, evidence.search.reason
    assert evidence.parity.samples == len(list((tmp_path / "data").iterdir()))
    assert evidence.parity.data == ("evaluation" if make is audio else "calibration")
    assert evidence.parity.sqnr_db > 10
    if make is audio:
        assert evidence.search.accuracy.samples == 8
        highest = max(np.abs(arrays_of(file)["x"]).max() for file in (tmp_path / "data").iterdir())
        span = quiet.work(case).prepared.calibrated[1].ranges["x"]
        assert max(-span.low, span.high) == pytest.approx(highest), "of samples of all lengths"


def test_the_sample_that_is_timed_has_a_length_in_the_middle(tmp_path: Path, session: Session) -> None:
    (load,) = session.work(decoder(tmp_path)).prepared.loads
    shapes = {name: value.shape for name, value in load.feeds.items()}
    assert shapes == {"ids": (1, 1), "past": (1, 5, DIM)}


@pytest.mark.parametrize(("batch", "is_noted"), [(1, False), (8, True)])
def test_a_batch_that_only_the_data_determines_is_noted(
    tmp_path: Path, session: Session, batch: int, is_noted: bool
) -> None:
    text, samples = "g (float[n,4] x) => (float[n,4] y) { y = MatMul(x, w) }", [{"x": normal(3, batch, 4)}]
    prepared = session.work(case_of(tmp_path, text, samples, w=normal(4, 4))).prepared
    assert prepared.data.shapes == {"x": (batch, 4)}
    noted = f"input 'x' is timed at [{batch}, 4], a batch of the data; declare inputs.shapes for another one"
    assert (noted in prepared.warnings) == is_noted


BRANCHES = """g (float[1,4,8,8] x, int64 rate) => (float[1,4,8,8] y) <int64 wide = {16000}> {
  is_wide = Equal(rate, wide)
  y = If (is_wide) <
    then_branch = yes () => (t) { c = Conv<pads = [1, 1, 1, 1]>(x, w)  t = Relu(c) },
    else_branch = no () => (e) { d = Neg(x)  e = Relu(d) }
  >
}"""


@pytest.fixture
def branch_case(tmp_path: Path) -> Case:
    data = {"x": normal(4, 1, 4, 8, 8), "rate": np.full(4, 8000)}
    case = written_case(tmp_path, BRANCHES, data, TuneRules(trials=2), w=normal(4, 4, 3, 3, seed=1))
    return replace(case, inputs=replace(case.inputs, values={"rate": 16000}))


def test_a_fixed_input_is_removed_and_parity_is_measured_at_its_value(session: Session, branch_case: Case):
    result = session.tune(branch_case)
    given = session.model(branch_case)
    assert given.where == str(branch_case.model)
    assert given.inputs == ("x",)
    assert [node.op_type for node in given.nodes] == ["Conv", "Relu"]
    other = session.model(replace(branch_case, inputs=replace(branch_case.inputs, values={"rate": 8000})))
    assert [node.op_type for node in other.nodes] == ["Neg", "Relu"]
    assert load_model(result.model).inputs == ("x",)
    assert result.parity.sqnr_db > 25  # compared with the branch for 16000, not with that of the data
    warnings = result.evidence.warnings
    assert any("input 'rate' is fixed to 16000: the tuned model has no such input" in w for w in warnings)


DECLARED = """g (float[1,16,32] x, int64[k] s) => (float[{declared}] y) {{
  [mm] m = MatMul(x, w)  y = Reshape(m, s) }}"""


@pytest.mark.parametrize(
    ("declared", "shown", "now"),
    [("1, 16, 32", "[1, 16, 32]", [None, None]), ("n, 31", "[?, 31]", ["n", None])],
)
def test_a_wrongly_declared_output_shape_is_corrected_with_a_warning(
    session: Session, declared: str, shown: str, now: list[str | None], tmp_path: Path
) -> None:
    data = {"x": normal(3, 1, 16, 32, seed=1), "s": np.full((3, 2), [16, 32])}
    text = DECLARED.format(declared=declared)
    case = written_case(tmp_path, text, data, TuneRules(trials=1), w=normal(32, 32))
    given = case.model.read_bytes()
    two = InputShape(min=(2,), opt=(2,), max=(2,))
    case = replace(case, inputs=replace(case.inputs, profiles=(ShapeProfile(shapes={"s": two}),)))
    result = session.tune(case)
    (output,) = load_model(result.model).proto.graph.output
    dims = output.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value or None for dim in dims] == now
    warning = f"output 'y': {shown} is declared, [16, 32] is computed; corrected in a copy of the model"
    assert warning in result.evidence.warnings
    assert case.model.read_bytes() == given


COMPRESSED = """net (float[1,16] x) => (float[n,16] y) {
  a = MatMul(x, w)  b = Relu(a)  c = MatMul(b, v)  d = Reshape(c, rows)
  e = ReduceMax<axes = [1], keepdims = 0>(d)  f = Greater(e, least)  y = Compress<axis = 0>(d, f) }"""
ROWS = 64  # some of their maxima are so close to the limit that quantized weights change their number


def test_placements_whose_outputs_have_another_length_are_not_built(session: Session, tmp_path: Path):
    random = np.random.default_rng(0)
    shapes = {"w": (16, 32), "v": (32, 16 * ROWS)}
    constants = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    constants |= {"rows": np.array([ROWS, 16]), "least": np.float32(1.5)}
    samples = [random.normal(size=(16, 1, 16)).astype(np.float32) for _ in range(2)]
    case = written_case(tmp_path, COMPRESSED, {"x": samples[0]}, TuneRules(trials=4), **constants)
    np.savez(tmp_path / "evaluation.npz", x=samples[1])
    case = replace(case, inputs=replace(case.inputs, evaluation=tmp_path / "evaluation.npz"))
    found = session.search(case)
    assert found.unchanged
    assert "expected below 20 dB and not built" in found.reason
    searched = [trial for trial in found.trials if trial.phase != "confirm"]
    assert all(trial.ok for trial in searched)


# Two consecutive products of the rows of a table that indices select; the number of rows is dynamic.
TABLE = """dynamic (int64[batch,rows] ids) => (float[batch,rows,64] y) {
  [gather] x = Gather(table, ids)  [matmul0] a = MatMul(x, w0)  [relu] b = Relu(a)  [matmul1] y = MatMul(b, w1) }"""


def spans(rows: int, weight: float, *, low: int = 1) -> ShapeProfile:
    shape = InputShape(min=(1, low), opt=(1, rows), max=(1, 4 * rows))
    return ShapeProfile(shapes={"ids": shape}, weight=weight)


@pytest.fixture
def profile_case(tmp_path: Path) -> Case:
    """Two profiles: few rows with weight 0.75, many rows with 0.25; the data has the shape of the first."""
    data = {"ids": np.arange(3 * 8).reshape(3, 1, 8) % 7}
    weights = {"table": normal(7, 64), **kernels(2, 64, 64)}
    case = written_case(tmp_path, TABLE, data, TuneRules(trials=3), **weights)
    return replace(case, inputs=replace(case.inputs, profiles=(spans(8, 3.0), spans(32, 1.0))))


def test_inputs_of_other_profiles_are_repetitions_of_the_data(session: Session, profile_case: Case):
    first, second = session.work(profile_case).prepared.loads
    assert (first.name, first.share, second.name, second.share) == ("ids 1x8", 0.75, "ids 1x32", 0.25)
    given = arrays_of(profile_case.inputs.calibration)["ids"][0]
    np.testing.assert_array_equal(first.feeds["ids"], given)
    np.testing.assert_array_equal(second.feeds["ids"], np.tile(given, 4))


@pytest.mark.parametrize("backend", ["onnxruntime", "fake"])
def test_every_build_is_timed_at_every_profile(profile_case: Case, tmp_path: Path, backend: str):
    with Session(backend=backend, root=tmp_path, layout="") as session:
        result = session.tune(profile_case)
        found = result.record.cases[0].evidence
        latency = found.latency
    assert [(p.name, p.share) for p in latency.profiles] == [("ids 1x8", 0.75), ("ids 1x32", 0.25)]
    for samples in latency.samples.values():
        assert [len(part.wall_ms) for part in samples.profiles] == [len(samples.wall_ms)] * 2
        assert all(len(part.first.wall_ms) == len(samples.wall_ms) for part in samples.profiles)
    assert all(set(p.ratios) == set(latency.samples) for p in latency.profiles)
    lines = [json.loads(line) for line in (tmp_path / "reports" / "trials.jsonl").read_text().splitlines()]
    timed = [line["samples"] for line in lines if line["samples"]["wall_ms"]]
    assert timed
    assert all(len(samples["profiles"]) == 2 for samples in timed)


def test_records_and_reports_show_each_profile(profile_case: Case, tmp_path: Path):
    with Session(backend="fake", root=tmp_path) as session:
        result = session.tune(profile_case)
    record, latency = result.record, result.latency
    few, many = (part.ratios["everything"].median for part in latency.profiles)
    assert few != pytest.approx(many, rel=0.05)
    assert latency.ratios["everything"].median == pytest.approx(few**0.75 * many**0.25, rel=0.005)
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


def test_subgraphs_are_timed_at_the_first_profile(session: Session, profile_case: Case, tmp_path: Path):
    tuned = replace(profile_case, tune=TuneRules(strategy="subgraph", trials=3))
    prepared = session.work(tuned).prepared
    _, load = CandidateFiles(prepared, tmp_path).part(Placement(sites=frozenset()), ("matmul1",))
    assert (load.feeds["b"].shape, load.share) == ((1, 8, 64), 1.0)
    trials = session.search(tuned).trials
    parts = [trial for trial in trials if trial.subgraph]
    assert parts
    assert all(trial.ok for trial in parts), [trial.error for trial in parts]
