"""The backend `onnxruntime-web` in headless Chromium: the same results as in Node, elapsed time, and the end of its
processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from processes import processes_with, wait_until
from web_installed import require_web

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime_web import install
from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb, OnnxRuntimeWebEngine
from qdqspec.errors import BackendError
from qdqspec.testing.backends import NODES, small_model

IN_CHROMIUM = BuildOptions(extra={"onnxruntime-web.browser": "chromium"})
FEEDS = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    require_web(IN_CHROMIUM)
    onnx.save(small_model(quantized=True), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all temporary files."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def engine(scratch: Path, small: Path) -> Iterator[OnnxRuntimeWebEngine]:
    with closing(OnnxRuntimeWeb().build(small, IN_CHROMIUM)) as built:
        yield built


# ---- without a browser ----------------------------------------------------------------------------


def test_without_a_browser_the_probe_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_web()
    node = shutil.which("node")
    monkeypatch.setattr(install, "require_package", lambda *_: Path())
    monkeypatch.setattr(install.shutil, "which", lambda name: node if name == "node" else None)
    asked = OnnxRuntimeWeb().probe(IN_CHROMIUM)
    assert (asked.usable, asked.why) == (False, "there is no Chromium on PATH")
    assert "install Chromium" in asked.install
    assert OnnxRuntimeWeb().probe().usable
    assert "no Chromium" in OnnxRuntimeWeb().probe().facts["browser"]


# ---- with a browser -------------------------------------------------------------------------------


def test_outputs_and_kernels_equal_those_of_node(engine: OnnxRuntimeWebEngine, small: Path) -> None:
    with closing(OnnxRuntimeWeb().build(small, BuildOptions())) as node:
        np.testing.assert_array_equal(engine.run(FEEDS)["y"], node.run(FEEDS)["y"])
        assert engine.graph_hash == node.graph_hash


def test_elapsed_time_has_a_resolution_of_microseconds_and_layers_have_times(
    engine: OnnxRuntimeWebEngine,
) -> None:
    engine.bind(FEEDS)
    samples = engine.time(100)
    assert not samples.cpu_ms
    steps = np.diff(np.unique(np.round(samples.wall_ms, 6)))
    assert 0.004 < steps.min() < 0.02  # without cross-origin isolation .1
    layers = engine.layers(3)
    assert {"conv", "gemm"} <= {node for layer in layers for node in layer.nodes} <= set(NODES)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("killed", [False, True])
def test_the_browser_ends_with_its_engine_and_leaves_no_files(
    engine: OnnxRuntimeWebEngine, scratch: Path, killed: bool
) -> None:
    assert len(processes_with(str(scratch))) > 2  # Node, the browser, its renderer
    if killed:
        assert engine._native is not None
        os.kill(engine._native.pid, signal.SIGKILL)
    engine.close()
    wait_until(lambda: not processes_with(str(scratch)))
    assert killed or not [path for path in scratch.rglob("*") if path.is_file()]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_a_crash_of_the_page_is_an_error_with_the_reason(engine: OnnxRuntimeWebEngine) -> None:
    assert engine._native is not None
    assert engine._native._thread is not None
    os.kill(engine._native._thread, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"ended with code 70 during 'run': .*the page crashed"):
        wait_until(lambda: not engine.run(FEEDS))  # a run may end before the page has crashed
