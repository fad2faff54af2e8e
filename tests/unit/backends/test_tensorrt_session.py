"""A whole search on the fake TensorRT, and a run of the hardware tests, unchanged, on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trt_surface import ROOT

from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, TuneRules

MODEL = ROOT / "specs" / "models" / "squeezenet10.onnx"


@pytest.mark.parametrize("version", ["10.9.0.34", "11.4.0.106"])
def test_a_search_selects_a_faster_placement(
    version: str, install_tensorrt: Callable[[str], None], tmp_path: Path
):
    install_tensorrt(version)
    case = Case(id="default", model=MODEL, inputs=Inputs(batch=1), tune=TuneRules(trials=2))
    words = ("tensorrt.opt-level=4",)
    session = Session(
        backend="tensorrt", backend_option=words, output=tmp_path / "out", cache_dir=tmp_path / "cache"
    )
    try:
        work = session.work(case)
        search = work.search
        assert all(trial.ok for trial in search.trials), [trial.error for trial in search.trials]
        assert not search.unchanged  # the simulated kernels are faster in integers
        assert work.latency is not None
        assert work.latency.speedup.low > 1
        assert {site.format for site in search.winner.sites} == {"int8"}
        assert work.parity.outputs
    finally:
        session.close()
    state = work.prepared.output / "tensorrt"
    assert len(list(state.glob("nvidia-fake-100-sm90-tensorrt-*.timing-cache"))) == 1
    builds = [json.loads(line) for line in (state / "builds.jsonl").read_text("utf-8").splitlines()]
    assert sum("plan_bytes" in build for build in builds) > len(search.trials)
    assert {build["profiles"] for build in builds if "profiles" in build} == {0}  # every shape is fixed
    assert all(build["cuda_graph"] for build in builds if "cuda_graph" in build)


def test_notes_of_the_runtime_are_in_record_and_reports(
    newest: None, fail: Callable[[str], None], tmp_path: Path, model: Path, engine_threads: None
):
    """Notes on samples of an engine are in the trial, the record, the footnotes of the table and the HTML page."""
    from qdqspec.app.report.tables import warning_lines
    from qdqspec.app.report.write import render, write_results

    fail("short-of-memory,no-graph")
    tune = TuneRules(trials=1, min_sqnr_db="none")
    case = Case(id="default", model=model, inputs=Inputs(batch=1), tune=tune)
    with Session(backend="tensorrt", output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        result = session.tune(case)
        search = session.work(case).search
        write_results(result.record)
        written = session.output(case) / "result.json"
    both = (
        "short of GPU memory: the builder skipped kernels",
        "not recorded as a CUDA graph: cudaStreamEndCapture",
    )
    for note in both:
        assert any(each.startswith(note) for each in search.trials[0].samples.notes)
        (warning,) = [w for w in result.record.cases[0].evidence.warnings if note in w]
        assert warning.startswith("latency of reference")
        assert note in written.read_text("utf-8")
        assert any(note in line for line in warning_lines(result.record)), "under the table"
        for name in ("report.html", "report.md"):
            assert note in render(result.record, Path(name)).decode(), name


def run_device_tests(site: Path, *words: str) -> str:
    paths = [str(site), str(ROOT / "tests" / "support" / "fake_trt")] if site.is_dir() else []
    run = [sys.executable, "-m", "pytest", "tests/device", "-m", "not slow", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*run, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_hardware_tests_pass_on_the_fake_tensorrt(
    install_tensorrt: Callable[[str], None], tmp_path: Path
):
    install_tensorrt("10.16.1.11")
    parsing = "test_asymmetric_quantization_is_refused_with_the_node"
    said = run_device_tests(
        tmp_path / "site", "--qdq-backend=tensorrt", f"--deselect=tests/device/test_tensorrt.py::{parsing}"
    )
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith("is declared") for line in skipped), said
    assert "passed" in said


def test_the_hardware_tests_pass_with_the_simulated_trtexec(
    install_trtexec: Callable[..., object], tmp_path: Path
):
    """Tests of the Python API are skipped with a reason; the others run with the tool."""
    install_trtexec("10.16")
    said = run_device_tests(tmp_path / "nothing", "--qdq-backend=trtexec")
    assert "this is about the Python API: pytest tests/device --qdq-backend=tensorrt" in said
    assert "trtexec is not usable" not in said
    assert "passed" in said
