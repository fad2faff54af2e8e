"""Inputs that fail a parity check are found, saved, and run again, also by Polygraphy."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from onnx_text import saved
from stand_ins import RunsModels
from written_cases import check_of, written_case

from qdqspec._core import hooks
from qdqspec._core.arrays import Array
from qdqspec.accuracy.compare import Typical
from qdqspec.accuracy.probes import SavedProbe
from qdqspec.app.cli import main
from qdqspec.app.evidence.parity import both_models
from qdqspec.app.evidence.probes import find_input, replay_failure, save_replay
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.checks.base import requests_of
from qdqspec.errors import BackendError, DataError
from qdqspec.testing.records import params_of
from qdqspec.types import Case, InputShape, ParitySearch, ShapeProfile, TriedInput
from qdqspec.types.requests import InputRequest

# A quantizer for -1 to 1 before a weighted sum: exact within this range, saturated outside.
TEXT = "net (float[batch,4] x) => (float[batch,1] y) { y = MatMul(x, w) }"
TUNED = """net (float[batch,4] x) => (float[batch,1] y) {
  q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = MatMul(d, w) }"""
WEIGHT = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    with Session(root=tmp_path) as opened:
        yield opened


@pytest.fixture
def case(tmp_path: Path) -> Case:
    data = np.random.default_rng(0).uniform(-1, 1, (16, 4)).astype(np.float32)
    data[0], data[1] = 1, -1
    case = written_case(tmp_path, TEXT, {"x": data}, w=WEIGHT)
    profile = ShapeProfile(shapes={"x": InputShape(min=(1, 4), opt=(1, 4), max=(8, 4))})
    return replace(case, inputs=replace(case.inputs, profiles=(profile,)))


def searched(session: Session, case: Case, tuned: Path, **asked: object) -> ParitySearch:
    requests = requests_of(check_of("parity", **{"min_sqnr_db": 20, "search": 200, **asked}))
    (request,) = (request for request in requests if isinstance(request, InputRequest))
    return find_input(session.work(case).prepared, tuned, request, "parity")


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return quantized(tmp_path / "tuned.onnx", TUNED, 1 / 127, w=WEIGHT)


def quantized(path: Path, text: str, scale: float, **weights: np.ndarray) -> Path:
    return saved(path, text, opset=17, ir_version=8, s=np.float32(scale), z=np.int8(0), **weights)


def test_an_input_outside_the_range_is_found_and_shrunk(session: Session, case: Case, tuned: Path) -> None:
    found = searched(session, case, tuned).found
    (x,) = found.inputs
    found_x = {"name": "x", "dtype": "float32", "shape": (1, 4), "words": "all 2", "low": 2, "high": 2}
    assert x == TriedInput(**found_x, known_low=-1, known_high=1)
    assert not found.within
    # 20 becomes 10, which is 6 dB; the quantizer saturates, the runtime adds no error.
    assert found.broken == ("output 'y': SQNR 6.0 dB < 20.0 dB",)
    assert found.parity.quantization[0].sqnr_db == pytest.approx(6.02, abs=0.01)
    assert found.parity.runtime[0].sqnr_db > 90


def test_no_failing_input_is_found_within_the_range(session: Session, case: Case, tuned: Path) -> None:
    file = session.output(case) / "parity" / "parity.npz"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of an earlier search")
    for search in ({"beyond": 1}, {"values": {"x": [-1, 1]}}, {"values": {"x": [0, 0.5]}, "beyond": 9}):
        found = searched(session, case, tuned, search={"examples": 80, **search})
        assert found.found is None
        assert found.tried > 50
        assert 20 < found.closest_db < 90
    assert not file.exists()
    unchanged = searched(session, case, case.model)
    assert (unchanged.tried, unchanged.missing) == (0, "the model is unchanged")


def test_the_saved_input_is_read_by_numpy_and_fails_again(
    session: Session, case: Case, tuned: Path, tmp_path: Path
) -> None:
    probe = searched(session, case, tuned, max_abs=3).found
    arrays = arrays_of(tmp_path / probe.file)
    np.testing.assert_array_equal(arrays["x"], np.full((1, 1, 4), 2, np.float32))
    again = session.probe(case.model, tuned, tmp_path / probe.file)
    assert (again.broken, again.inputs) == (probe.broken, probe.inputs)
    assert again.parity == probe.parity
    other = session.probe(case.model, tuned, tmp_path / probe.file, params_of("parity", max_abs=11))
    assert other.broken == ()
    assert session.probe(case.model, case.model, tmp_path / probe.file).broken == ()
    np.savez(tmp_path / "mine.npz", x=np.full((1, 1, 4), 5, np.float32))
    unlimited = session.probe(case.model, tuned, tmp_path / "mine.npz")
    assert unlimited.broken == unlimited.inputs == ()
    assert unlimited.parity.sqnr_db < 5


def test_the_reported_command_runs_the_saved_input(
    session: Session, case: Case, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = searched(session, case, tuned).found
    words = shlex.split(probe.command.splitlines()[0])  # Polygraphy repeats it with the others
    assert words[:2] == ["qdqspec", "verify"]
    assert main(words[1:]) == 1
    out = capsys.readouterr().out
    assert out.startswith("output 'y': SQNR 6.0 dB < 20.0 dB\n")
    assert "all 2" in out
    assert "-1 to 1" in out
    quantized(tuned, TUNED, 2 / 127, w=WEIGHT)  # a wider calibrated range
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.startswith("no limit is broken\n")
    assert main(["verify", str(case.model), str(tuned)]) == 0
    unlimited = capsys.readouterr()
    assert unlimited.out.startswith("not judged: no limit is given, such as --min-sqnr-db 20\n")
    note = "note: no calibration data: random inputs are used, so scales and parity prove little\n"
    assert unlimited.err == note


class Fragile(RunsModels):
    """A runtime whose quantized models fail on large values."""

    name = target = "fragile"

    def build(self, model: Path, options: BuildOptions) -> Engine:
        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            if feeds["x"].min() < -1.2:
                raise BackendError("no model takes so small a value")
            if "tuned" in model.name and feeds["x"].max() > 1.5:
                raise BackendError("illegal memory access")
            if feeds["x"].min() < -1:
                return {"y": np.array([np.nan], np.float32)}
            return {"y": feeds["x"].sum(axis=1).astype(np.float32)}

        return SimpleNamespace(run=run, close=lambda: None)  # type: ignore[return-value]  # the used part of an engine


def replace_resources(session: Session, case: Case, **words: Any) -> None:
    bench = session.work(case).prepared
    bench.resources = replace(bench.resources, **words)


def test_an_input_on_which_the_tuned_model_fails_to_run_is_a_failing_input(
    session: Session, case: Case, tuned: Path
) -> None:
    """Inputs on which the float model fails or returns NaN are not counted."""
    replace_resources(session, case, backend=Fragile())
    found = searched(session, case, tuned, search={"beyond": 4})
    assert found.found.broken == ("the tuned model does not run on it: illegal memory access",)
    assert found.found.parity.outputs == ()
    assert found.found.inputs[0].low >= -1


def test_the_input_search_ends_at_the_time_limit_of_a_run(session: Session, case: Case, tuned: Path) -> None:
    replace_resources(session, case, seconds_left=lambda: 0.0)
    found = searched(session, case, tuned)
    assert found.late
    assert found.tried == 0
    assert found.missing


# ---- files --------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20)
DTYPES = st.sampled_from([np.float32, np.int64, np.float16, np.bool_])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_side=3))


@given(feeds=st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=3))
def test_a_saved_input_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, feeds: dict[str, np.ndarray]
) -> None:
    path = tmp_path_factory.mktemp("probe") / "probe.npz"
    tried = {"name": "x", "dtype": "f", "shape": (1, 2), "words": "all", "low": 0, "high": 1}
    kept = SavedProbe(
        feeds=feeds,
        limits=params_of("parity", min_sqnr_db=20, outputs=["y*"], search=7),  # type: ignore[arg-type]  # valid parameters
        typical={"y": Typical(power=2.5, low=-1, high=3, finite=False)},
        inputs=(TriedInput(**tried, known_low=0, known_high=2),),
    )
    kept.write(path)
    read = SavedProbe.read(path)
    assert (read.limits, read.typical, read.inputs) == (kept.limits, kept.typical, kept.inputs)
    assert read.feeds.keys() == feeds.keys()
    for name, array in feeds.items():
        assert read.feeds[name].dtype == array.dtype
        np.testing.assert_array_equal(read.feeds[name], array)


@given(st.binary(max_size=300))
def test_invalid_parameters_are_an_error(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("probe") / "probe.npz"
    np.savez(path, x=np.zeros((1, 2)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("check.json", text)
    with pytest.raises(DataError, match=r"'check.json' in it is damaged"):
        SavedProbe.read(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("damaged", "cannot be read as .npz"), ("absent", "no such data file"), ("empty", "holds no sample")],
)
def test_a_file_that_is_no_saved_input_is_an_error(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 nonsense")
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 4)))
    with pytest.raises(DataError, match=words) as caught:
        SavedProbe.read(tmp_path / f"{name}.npz")
    assert caught.value.where == str(tmp_path / f"{name}.npz")


RELU = """net (float[batch,4] x) => (float[batch,4] y, float[batch,4] same) { y = Relu(x)  same = Neg(x) }"""
# Saturates at 1: the third sample below is outside.
RELU_TUNED = """net (float[batch,4] x) => (float[batch,4] y, float[batch,4] same) {
  q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Relu(d)  same = Neg(x) }"""


@pytest.fixture
def relu_case(tmp_path: Path) -> Case:
    data = np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32)
    data[2] = 3
    return written_case(tmp_path, RELU, {"x": data})


@pytest.fixture
def relu_tuned(tmp_path: Path) -> Path:
    return quantized(tmp_path / "relu_tuned.onnx", RELU_TUNED, 1 / 127)


def _verdict(commands: str) -> int:
    """The exit code of the last command; those before must succeed."""
    *before, last = [
        subprocess.run(
            [str(Path(sys.executable).with_name("polygraphy")), *shlex.split(line)[1:]],
            capture_output=True, text=True, timeout=300, check=False,
        )
        for line in commands.splitlines()
    ]  # fmt: skip
    assert all(done.returncode == 0 for done in before), before
    assert "Pass Rate" in last.stdout, last
    return last.returncode


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ({"min_sqnr_db": 30}, {"min_sqnr_db": 3}),
        ({"max_steps": 10, "outputs": ["y"]}, {"max_steps": 200}),
        ({"min_sqnr_db": 30, "min_cosine": 0.5}, {"min_sqnr_db": 3, "min_cosine": 0.5}),
    ],
    ids=["sqnr", "steps", "two limits"],
)
def test_polygraphy_repeats_the_failure_of_the_worst_sample(
    session: Session, relu_case: Case, relu_tuned: Path, broken: dict[str, object], kept: dict[str, object]
) -> None:
    prepared = session.work(relu_case).prepared
    command = replay_failure(prepared, relu_tuned, params_of("parity", **broken), "parity")
    assert "--onnxrt" in command
    assert _verdict(command) == 1

    feeds, _ = prepared.data.for_comparison()
    worst = list(feeds)[2]
    limits = params_of("parity", **kept)
    with both_models(prepared, relu_tuned) as models:
        looser = save_replay(prepared, relu_tuned, limits, "parity", worst, models.run(worst))
    assert _verdict(looser) == 0


@pytest.mark.parametrize(
    "limits", [{"min_cosine": 0.9, "outputs": ["y"]}, {"min_sqnr_db": 20}], ids=["cosine", "booleans"]
)
def test_polygraphy_repeats_the_failure_of_one_sample_of_a_batch(
    session: Session, tmp_path: Path, limits: dict[str, object]
) -> None:
    """Half a step of the grid is lost, which the other samples hide; a text is no tensor of numbers."""
    text = "net (float[batch,4] x) => (float[batch,4] y, bool[batch,4] some, string[batch,4] text) { %s }"
    rest = "c = Constant <value_float = 0.002> ()  some = Greater(y, c)  text = Cast <to = 8> (some)"
    data = np.random.default_rng(0).uniform(0.2, 1, (5, 4)).astype(np.float32)
    data[4] = 0.003, 0.006, 0.001, 0
    case = written_case(tmp_path, text % f"y = Identity(x) {rest}", {"x": data})
    case = replace(case, inputs=replace(case.inputs, batch=3))
    pair = f"q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) {rest}"
    tuned = quantized(tmp_path / "tuned.onnx", text % pair, 1 / 127)
    command = replay_failure(session.work(case).prepared, tuned, params_of("parity", **limits), "parity")
    assert _verdict(command) == 1


def test_polygraphy_cannot_repeat_a_failure_of_infinite_outputs(session: Session, tmp_path: Path) -> None:
    text = "net (float[1,4] x) => (float[1,4] y) { %s  r = Relu(d)  y = Log(r) }"
    case = written_case(tmp_path, text % "d = Identity(x)", {"x": np.float32([[0.3, -1, 0.2, 0.1]])})
    pair = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
    tuned = quantized(tmp_path / "tuned.onnx", text % pair, 1 / 127)
    assert (
        replay_failure(session.work(case).prepared, tuned, params_of("parity", min_sqnr_db=99), "parity")
        == ""
    )


def test_a_backend_without_a_runner_compares_the_outputs_that_were_saved_if_a_limit_is_broken(
    session: Session, relu_case: Case, relu_tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = session.work(relu_case).prepared
    assert replay_failure(prepared, relu_tuned, params_of("parity", min_sqnr_db=3), "parity") == ""
    assert not (prepared.output / "parity" / "parity").exists()
    without = replace(hooks.declaration_of(prepared.backend.name), polygraphy=())
    monkeypatch.setattr(hooks, "declaration_of", lambda _: without)
    command = replay_failure(prepared, relu_tuned, params_of("parity", min_sqnr_db=30), "parity")
    assert "--onnxrt" not in command
    assert _verdict(command) == 1
