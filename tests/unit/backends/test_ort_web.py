"""The backend `onnxruntime-web`: Node ends with its engine, failures have reasons, versions are pinned and files
packaged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_text import saved
from processes import runs, wait_until
from web_installed import require_web

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime_web import install
from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb, OnnxRuntimeWebEngine
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model

FEEDS = {"x": np.ones((1, 3, 8, 8), np.float32)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    require_web()
    onnx.save(small_model(), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def build(path: Path, **options: object) -> OnnxRuntimeWebEngine:
    return OnnxRuntimeWeb().build(path, BuildOptions(**options))  # type: ignore[arg-type]


def pid_of(engine: OnnxRuntimeWebEngine) -> int:
    assert engine._native is not None
    return engine._native.pid


# ---- without Node ---------------------------------------------------------------------------------


def test_without_node_the_probe_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    availability = OnnxRuntimeWeb().probe()
    assert not availability.usable
    assert "no node" in availability.why
    assert "Node 20" in availability.install


def test_without_the_package_the_probe_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(install, "require_node", lambda: ("node", "22.1.0"))
    monkeypatch.setattr("qdqspec.backends.onnxruntime_web.engine.require_node", lambda: ("node", "22.1.0"))
    availability = OnnxRuntimeWeb().probe()
    assert (availability.usable, availability.install) == (
        False,
        "python -m qdqspec.backends.onnxruntime_web.install",
    )
    assert str(tmp_path) in availability.why


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = install.modules_folder() / "node_modules" / "onnxruntime-web"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"version": "1.2.3"}))
    with pytest.raises(BackendError, match=r"onnxruntime-web 1\.2\.3 is in"):
        install.require_package()


def test_the_lock_file_pins_the_version_and_names_no_host() -> None:
    text = (install.HERE / "package-lock.json").read_text()
    locked = json.loads(text)["packages"]
    assert locked["node_modules/onnxruntime-web"]["version"] == install.pinned_version()
    assert all("integrity" in package for name, package in locked.items() if name.startswith("node_modules/"))
    assert not re.search(r'"resolved"|https?://[^"]*(registry|npm)', text)


# ---- with Node ------------------------------------------------------------------------------------


def test_node_ends_with_its_engine(small: Path) -> None:
    closed, deleted = build(small), build(small)
    pids = pid_of(closed), pid_of(deleted)
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
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not runs(pid))


def test_a_crash_is_an_error_with_the_reason_and_a_later_build_works(small: Path) -> None:
    engine = build(small)
    os.kill(pid_of(engine), signal.SIGKILL)
    with pytest.raises(BackendError, match="Node ended with code -9 during 'run'"):
        engine.run(FEEDS)
    assert set(build(small).run(FEEDS)) == {"y"}


def test_a_call_that_takes_too_long_ends_node(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(small)
    pid = pid_of(engine)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(OnnxRuntimeWebEngine, "_patience", lambda *_: 0.2)
    with pytest.raises(BackendError, match="no answer to 'run'"):
        engine.run(FEEDS)
    wait_until(lambda: not runs(pid))


def test_a_refused_model_is_an_error_with_the_reason_of_the_runtime(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_web()
    model = small_model()
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(BackendError, match="NoSuchOperator") as caught:
        build(tmp_path / "odd.onnx")
    assert caught.value.where == str(tmp_path / "odd.onnx")
    assert "\n" not in caught.value.what
    assert capfd.readouterr() == ("", "")


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
    require_web()
    name = {"float32": "float"}.get(dtype, dtype)
    path = saved(tmp_path / "m.onnx", f"g ({name}[2,3] x) => ({name}[2,3] y) {{ y = Identity(x) }}")
    value = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    result = build(path).run({"x": value})["y"]
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result, value)
