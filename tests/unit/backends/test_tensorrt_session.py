"""A fake TensorRT in the backend contract, in child processes, in whole searches, and in the hardware tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from trt_surface import ROOT

from qdqspec.app.session import Session
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import has_memory
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.testing.backends import BackendContract
from qdqspec.types import Case, Inputs, TuneRules


class TestTensorRt(BackendContract):
    @pytest.fixture
    def backend(self, tensorrt_version: str) -> Backend:
        backend = TensorRt()
        assert backend.target == f"tensorrt-{tensorrt_version[:2]}"
        return backend


FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}


def test_memory_of_the_gpu_is_reported_and_grows_with_bound_inputs(model: Path, newest: None) -> None:
    with Isolated("tensorrt") as backend:
        engine = backend.build(model, BuildOptions())
        used, free = engine.device_memory()
        assert has_memory([engine], 20)  # half a GiB is added to each for its CUDA context; 40 GiB are free
        assert not has_memory([engine], 100)
        engine.bind(FEEDS)
        more, less = engine.device_memory()
        assert min(more - used, free - less) >= FEEDS["x"].nbytes + 5 * 4
    assert "tensorrt" not in sys.modules, "the parent process can no longer be forked"


def test_notes_of_the_runtime_are_in_record_and_reports(
    newest: None, fail: Callable[[str], None], tmp_path: Path, model: Path, engine_threads: None
):
    """Notes on samples of an engine are in the trial, the record, the footnotes of the table and the HTML page."""
    from qdqspec.app.report.tables import warning_lines
    from qdqspec.app.report.write import render, write_results

    fail("short-of-memory,no-graph,slow-fp4")
    tune = TuneRules(trials=1, min_sqnr_db="none")
    case = Case(id="default", model=model, inputs=Inputs(batch=1), tune=tune)
    with Session(backend="tensorrt", output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        result = session.tune(case)
        search = session.work(case).search
        write_results(result.record)
        written = session.output(case) / "result.json"
    for note in (
        "short of GPU memory: the builder skipped",
        "TensorRT warns: FP4 Q/DQ layers, but the hardware does not accelerate FP4",
        "not recorded as a CUDA graph: cudaStreamEndCapture",
    ):
        assert any(each.startswith(note) for each in search.trials[0].samples.notes)
        (warning,) = [w for w in result.record.cases[0].evidence.warnings if note in w]
        assert warning.startswith("latency of reference")
        assert note in written.read_text("utf-8")
        assert any(note in line for line in warning_lines(result.record)), "under the table"
        for name in ("report.html", "report.md"):
            assert note in render(result.record, Path(name)).decode(), name


def run_device_tests(site: Path, *words: str) -> str:
    paths = [str(site), str(ROOT / "tests" / "support" / "fake_trt")] if site.is_dir() else []
    run = [
        sys.executable,
        *["-m", "pytest", "tests/device", "-q", "-p", "no:cacheprovider", "-m"],
        "not slow",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_hardware_tests_pass_on_the_fake_tensorrt(
    install_tensorrt: Callable[[str], None], tmp_path: Path
):
    install_tensorrt("10.16.1.11")
    parsing = "tests/device/test_tensorrt.py::test_asymmetric_quantization_is_refused_with_the_node"
    said = run_device_tests(tmp_path / "site", "--qdq-backend=tensorrt", f"--deselect={parsing}")
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
