"""A fake TensorRT of any supported version, installed where the backend and its child processes import it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnx
import pytest
from trt_surface import VERSIONS
from trtexec_install import Trtexec, answering, put_trtexec, run_here

from qdqspec.testing.backends import small_model
from qdqspec.timing import bench

SUPPORT = Path(__file__).parents[2] / "support"
_OURS = ("tensorrt", "cuda", "fake_gpu")


@pytest.fixture
def install_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``install_tensorrt("11.4.0.106")`` makes ``import tensorrt`` find a fake of that version."""
    from qdqspec.backends.tensorrt import log as trt_log, run as trt_run

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in _OURS]:
            del sys.modules[name]
        for made in (trt_log.open_log, trt_run._profiler_type, trt_run._allocator_type):
            made.cache_clear()

    def install(version: str) -> None:
        forget()
        package = tmp_path / "site" / f"tensorrt-{version}.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(SUPPORT / "fake_trt"))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield install
    forget()


@pytest.fixture
def newest(install_tensorrt: Callable[[str], None]) -> None:
    """The newest supported version, installed as a fake."""
    install_tensorrt(VERSIONS[-1])


@pytest.fixture(params=VERSIONS)
def tensorrt_version(request: pytest.FixtureRequest, install_tensorrt: Callable[[str], None]) -> str:
    """Each supported version, installed as a fake."""
    version: str = request.param
    install_tensorrt(version)
    return version


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file of the small model."""
    path = tmp_path / "model.onnx"
    onnx.save(small_model(), path)
    return path


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds and a few rounds, for tests that do not look at times."""
    monkeypatch.setitem(bench.Bench.measure_variation.__kwdefaults__, "plans", ((2, 4),))
    for name, fewer in (("builds", 2), ("rounds", 6)):
        monkeypatch.setitem(bench.Bench.compare.__kwdefaults__, name, fewer)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``fail("null-runtime")`` makes the fake TensorRT fail in this way."""
    return lambda name: monkeypatch.setenv("FAKE_TRT", name)


@pytest.fixture
def put_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``put_nvidia_smi(**{"clocks.sm": "1980"})`` puts a fake nvidia-smi with these fields on PATH; another call
    replaces it.

    A query for any other field fails, as with the real tool.
    """
    from qdqspec.backends.tensorrt import device as gpu_state

    folder = tmp_path / "smi"

    def put(**fields: str) -> Path:
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(answering(fields))
        script.chmod(0o755)
        gpu_state._queried.cache_clear()
        return script

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return put


@pytest.fixture
def install_trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trtexec]:
    """``install_trtexec("10.16", fault={"time": "crash"})`` puts a stand-in for trtexec and for its GPU on PATH."""
    return partial(put_trtexec, tmp_path / "trtexec", monkeypatch)


@pytest.fixture
def trtexec_here(engine_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the stand-in in this process: a search calls it hundreds of times, and an interpreter takes long to
    start."""
    monkeypatch.setattr("qdqspec.backends.trtexec.process.start_program", run_here)
