"""The backend `onnxruntime-web` in Node and headless Chromium: processes, failures, versions, results, operators."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from installed import require
from onnx_text import saved
from operator_models import IMAGE, MATRIX, ONE, Graph, layers_of
from processes import processes_with, runs, wait_until

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime import ops as table
from qdqspec.backends.onnxruntime_web import install
from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb, OnnxRuntimeWebEngine
from qdqspec.errors import BackendError
from qdqspec.testing.backends import NODES, small_model

FEEDS = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    require("onnxruntime-web")
    onnx.save(small_model(), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def build(path: Path, **options: object) -> OnnxRuntimeWebEngine:
    return OnnxRuntimeWeb().build(path, BuildOptions(**options))  # type: ignore[arg-type]


# ---- without Node ---------------------------------------------------------------------------------


def test_the_probe_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    without_node = OnnxRuntimeWeb().probe()
    assert (without_node.usable, "no node" in without_node.why) == (False, True)
    assert "Node 20" in without_node.install
    monkeypatch.setattr(install, "require_node", lambda: ("node", "22.1.0"))
    folder = install.modules_folder() / "node_modules" / "onnxruntime-web"
    for said in ("is not installed in", "1.2.3 is in"):
        found = OnnxRuntimeWeb().probe()
        assert not found.usable
        assert f"{said} {tmp_path}" in found.why
        assert found.install == "python -m qdqspec.backends.onnxruntime_web.install"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(json.dumps({"version": "1.2.3"}))


def test_the_lock_file_pins_the_version_and_names_no_host() -> None:
    text = (install.HERE / "package-lock.json").read_text()
    locked = json.loads(text)["packages"]
    assert locked["node_modules/onnxruntime-web"]["version"] == install.pinned_version()
    assert all("integrity" in package for name, package in locked.items() if name.startswith("node_modules/"))
    assert not re.search(r'"resolved"|https?://[^"]*(registry|npm)', text)


# ---- with Node ------------------------------------------------------------------------------------


def test_node_ends_with_its_engine(small: Path) -> None:
    closed, deleted = build(small), build(small)
    pids = closed._native.pid, deleted._native.pid
    closed.close()
    del deleted
    wait_until(lambda: not any(map(runs, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Node ends when it reads from its connection")
def test_node_ends_when_the_process_that_started_it_is_killed(small: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from qdqspec.backends.base import BuildOptions; "
        "from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb; "
        "engine = OnnxRuntimeWeb().build(Path(sys.argv[1]), BuildOptions()); "
        "print(engine._native.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(small)], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not runs(pid))


def test_a_crash_is_an_error_with_the_reason_and_a_later_build_works(small: Path) -> None:
    engine = build(small)
    os.kill(engine._native.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="Node ended with code -9 during 'run'"):
        engine.run(FEEDS)
    assert set(build(small).run(FEEDS)) == {"y"}


def test_wrong_inputs_are_refused_and_the_engine_continues(tmp_path: Path, small: Path) -> None:
    """It gives the result of an engine whose weights are in another file."""
    engine, path = build(small), tmp_path / "big.onnx"
    for wrong in ({"x": np.ones((3, 8), np.float32)}, {"y": FEEDS["x"]}, {"x": FEEDS["x"].astype(float)}):
        with pytest.raises(BackendError):
            engine.run(wrong)
    onnx.save(small_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").exists()
    np.testing.assert_array_equal(build(path).run(FEEDS)["y"], engine.run(FEEDS)["y"])
    with pytest.raises(BackendError, match="one thread"):
        build(small, threads=2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", "bool"])
def test_tensors_of_all_types_pass_through(tmp_path: Path, dtype: str) -> None:
    require("onnxruntime-web")
    name = {"float32": "float"}.get(dtype, dtype)
    path = saved(tmp_path / "m.onnx", f"g ({name}[2,3] x) => ({name}[2,3] y) {{ y = Identity(x) }}")
    value = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    result = build(path).run({"x": value})["y"]
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result, value)


# ---- headless Chromium -------------------------------------------------------------------------------


IN_CHROMIUM = BuildOptions(extra={"onnxruntime-web.browser": "chromium"})


@pytest.fixture
def in_browser(tmp_path: Path) -> Path:
    require("onnxruntime-web", IN_CHROMIUM)
    onnx.save(small_model(quantized=True), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all temporary files."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def browser_engine(scratch: Path, in_browser: Path) -> Iterator[OnnxRuntimeWebEngine]:
    with closing(OnnxRuntimeWeb().build(in_browser, IN_CHROMIUM)) as built:
        yield built


def test_without_a_browser_the_probe_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require("onnxruntime-web")
    node = shutil.which("node")
    monkeypatch.setattr(install, "require_package", lambda *_: Path())
    monkeypatch.setattr(install.shutil, "which", lambda name: node if name == "node" else None)
    asked = OnnxRuntimeWeb().probe(IN_CHROMIUM)
    assert (asked.usable, asked.why) == (False, "there is no Chromium on PATH")
    assert "install Chromium" in asked.install
    assert OnnxRuntimeWeb().probe().usable
    assert "no Chromium" in OnnxRuntimeWeb().probe().facts["browser"]


def test_outputs_and_kernels_equal_those_of_node(
    browser_engine: OnnxRuntimeWebEngine, in_browser: Path
) -> None:
    with closing(OnnxRuntimeWeb().build(in_browser, BuildOptions())) as node:
        np.testing.assert_array_equal(browser_engine.run(FEEDS)["y"], node.run(FEEDS)["y"])
        assert browser_engine.graph_hash == node.graph_hash


def test_elapsed_time_has_a_resolution_of_microseconds_and_layers_have_times(
    browser_engine: OnnxRuntimeWebEngine,
) -> None:
    browser_engine.bind(FEEDS)
    samples = browser_engine.time(100)
    assert not samples.cpu_ms
    steps = np.diff(np.unique(np.round(samples.wall_ms, 6)))
    assert 0.004 < steps.min() < 0.02  # without cross-origin isolation .1
    layers = browser_engine.layers(3)
    assert {"conv", "gemm"} <= {node for layer in layers for node in layer.nodes} <= set(NODES)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("killed", [False, True])
def test_the_browser_ends_with_its_engine_and_leaves_no_files(
    browser_engine: OnnxRuntimeWebEngine, scratch: Path, killed: bool
) -> None:
    assert len(processes_with(str(scratch))) > 2  # Node, the browser, its renderer
    if killed:
        os.kill(browser_engine._native.pid, signal.SIGKILL)
    browser_engine.close()
    wait_until(lambda: not processes_with(str(scratch)))
    assert killed or not [path for path in scratch.rglob("*") if path.is_file()]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_a_crash_of_the_page_is_an_error_with_the_reason(browser_engine: OnnxRuntimeWebEngine) -> None:
    os.kill(browser_engine._native._thread, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"ended with code 70 during 'run': .*the page crashed"):
        wait_until(lambda: not browser_engine.run(FEEDS))  # a run may end before the page has crashed


# ---- the operator table: the kernels of one model with all operators -------------------------------


def integer_operators(
    makers: dict[str, Callable[[Graph, str], str]], folder: Path, *, out: bool
) -> dict[str, bool]:
    """For each operator whether all kernels that compute its nodes are in integers; one build for all."""
    require("onnxruntime-web")
    g, nodes, outputs = Graph(), {}, []
    for op, make in makers.items():
        x = g.input(MATRIX if op in table.LINEAR else IMAGE)
        first, g.others = len(g.nodes), []
        results = [make(g, x), *g.others]
        nodes[op] = {node.name for node in g.nodes[first:]}
        outputs += [g.pair(y) if out else y for y in results]
    model = g.model(*outputs, opset=20 if "Gelu" in makers else 17)
    layers = layers_of(OnnxRuntimeWeb(), model, folder)
    found = {op: [x for x in layers if names & {*x.nodes} and not x.boundary] for op, names in nodes.items()}
    assert all(found.values())
    return {op: all(layer.integer for layer in own) for op, own in found.items()}


def test_operators_of_the_table_run_in_integers_between_pairs(tmp_path: Path) -> None:
    assert set(ONE) == set(table.LABELS)
    assert [op for op, integer in integer_operators(ONE, tmp_path, out=True).items() if not integer] == []


def test_label_in_only_is_offered_exactly_where_it_fuses(tmp_path: Path) -> None:
    found = integer_operators(ONE, tmp_path, out=False)
    offered = {op for op, kinds in table.LABELS.items() if "in-only" in kinds}
    assert {op for op in found.keys() - {"Concat", *table.MOVING} if found[op]} == offered
