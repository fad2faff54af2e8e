"""The installed TensorRT and the GPU, which another process finds, so that this one can still be forked; and CUDA."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt import cuda, device as trt_device
from qdqspec.backends.tensorrt.device import TENSORRT
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.backends.tensorrt.ops import capabilities
from qdqspec.errors import BackendError, BackendUnavailableError


def test_a_missing_tensorrt_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    trt_device._look.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("no process should be started"))
    availability = TensorRt().probe()
    assert (availability.usable, availability.why) == (False, "tensorrt is not installed")
    assert availability.install == "pip install 'qdqspec[tensorrt]'"
    assert TensorRt().target == "tensorrt"
    with pytest.raises(BackendUnavailableError, match="not installed"):
        TensorRt().device(BuildOptions())
    assert TensorRt().capabilities().formats == ("int8",)


def test_the_probe_reports_versions_gpu_driver_and_settings(
    tensorrt_version: str, put_nvidia_smi: Callable[..., Path]
):
    settings = {"driver_version": "580.65.06", "compute_mode": "Default", "mig.mode.current": "Disabled"}
    put_nvidia_smi(**settings)
    backend = TensorRt()
    availability = backend.probe()
    assert availability.usable, availability.why
    expected = {
        "tensorrt": tensorrt_version, "gpu": "NVIDIA Fake 100", "compute capability": "9.0", "memory": "80 GiB",
        "driver": "for CUDA 12.8", "cuda-bindings": "for CUDA 12.9", "driver version": "580.65.06",
        "compute mode": "Default", "MIG": "Disabled",
    }  # fmt: skip
    assert availability.facts.items() >= expected.items()
    major_minor = ".".join(tensorrt_version.split(".")[:2])
    key = backend.device(BuildOptions(extra={"tensorrt.opt-level": "4"}))
    assert key.key == f"nvidia-fake-100-sm90-tensorrt-{major_minor}"
    assert key.details["tensorrt.opt-level"] == "4"
    assert backend.target == f"tensorrt-{tensorrt_version[:2]}"


def test_a_missing_gpu_is_reported(newest: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_TRT", "no-gpu")
    availability = TensorRt().probe()
    assert not availability.usable
    assert "cudaGetDeviceCount failed: cudaErrorNoDevice" in availability.why
    assert "nvidia-smi" in availability.install
    assert availability.facts["tensorrt"] == "11.4.0.106"


def test_a_gpu_for_one_process_is_refused(newest: None, put_nvidia_smi: Callable[..., Path]):
    """Compared engines are open in two processes, of which the second would fail in every race."""
    put_nvidia_smi(
        **{"driver_version": "580", "compute_mode": "Exclusive_Process", "mig.mode.current": "Disabled"}
    )
    availability = TensorRt().probe()
    assert not availability.usable
    assert "EXCLUSIVE_PROCESS, but engines that are compared are open in two processes" in availability.why
    assert "--compute-mode=DEFAULT" in availability.install


def test_the_chosen_gpu_is_queried_and_used(
    newest: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
):
    monkeypatch.setenv("FAKE_TRT", "two-gpus")
    backend, second = TensorRt(), BuildOptions(device=1, state=tmp_path / "state")
    assert backend.probe().facts["gpu"] == "NVIDIA Fake 100"
    assert backend.probe(second).facts["gpu"] == "NVIDIA Fake 40"
    assert backend.device(second).key == "nvidia-fake-40-sm86-tensorrt-11.4"
    assert "fp8" in backend.capabilities().formats
    assert "fp8" not in backend.capabilities(second).formats
    backend.build(model, second).close()
    from fake_gpu import gpu

    assert gpu.device == 1
    (cache,) = (tmp_path / "state").glob("*.timing-cache")
    assert cache.name.startswith("nvidia-fake-40-sm86")
    with pytest.raises(BackendError, match="there is no GPU 2: 2 can be used"):
        TensorRt().device(BuildOptions(device=2))


# Other libraries may have written to standard error before a crash, and a core file would take time to write.
CRASH = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.stderr.write('OpenBLAS warning: few threads\\nbad driver')
sys.stderr.flush()
os.abort()
"""
LOOKS = "the process that looks for TensorRT"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (CRASH, rf"{LOOKS} was killed by SIGABRT; the end of its log: .*bad driver"),
        ("import time\ntime.sleep(3600)\n", f"{LOOKS} gave no answer for 2.5 s and was ended"),
        ("raise OSError('libnvinfer.so.11: gone')\n", "tensorrt cannot be imported: libnvinfer.so.11: gone"),
    ],
    ids=["crash", "hang", "error"],
)
def test_a_library_that_cannot_be_loaded_is_reported(
    newest: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, why: str
):
    (tmp_path / "site" / "sitecustomize.py").write_text("print('{} welcome')\n")  # without an effect
    assert TensorRt().probe().usable
    trt_device._look.cache_clear()
    if "sleep" in module:
        monkeypatch.setattr(trt_device, "_TIMEOUT", 2.5)
    (tmp_path / "site" / "tensorrt.py").write_text(module)
    availability = TensorRt().probe()
    assert not availability.usable
    assert re.fullmatch(why, availability.why), availability.why


def test_the_version_is_found_in_a_package_for_one_cuda_version_and_others_than_supported_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert TENSORRT.unsupported("8.6.1") == "TensorRT 8.6.1 is too old: 10.9 is the oldest that qdqspec knows"
    assert TENSORRT.unsupported("10.9.0.34") is TENSORRT.unsupported("11.9.1") is None
    assert "too new" in str(TENSORRT.unsupported("12.0.0"))
    package = tmp_path / "tensorrt_cu12-10.13.0.35.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-cu12\nVersion: 10.13.0.35\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert TENSORRT.installed_version() == "10.13.0.35"


OLDER = "mxfp8 needs compute capability 10.0 (Blackwell), and this GPU has"
OTHER = "mxfp8 is for compute capability 10.x, and this GPU has"


@pytest.mark.parametrize(
    ("capability", "version", "formats", "why"),
    [
        ((0, 0), (11, 4), "int8", "the GPU is not known, and mxfp8 is not for all"),
        ((8, 6), (11, 4), "int8 int4", f"{OLDER} 8.6"),
        ((8, 9), (11, 4), "int8 fp8 int4", f"{OLDER} 8.9"),
        ((10, 0), (11, 4), "int8 fp8 int4 nvfp4 mxfp8", None),
        ((10, 0), (10, 9), "int8 fp8 int4 nvfp4", "mxfp8 needs TensorRT 10.12, and this is 10.9"),
        ((12, 0), (11, 4), "int8 fp8 int4 nvfp4", f"{OTHER} 12.0"),
    ],
)
def test_formats_depend_on_the_compute_capability_and_others_are_missing_for_a_reason(
    capability: tuple[int, int], version: tuple[int, int], formats: str, why: str | None
):
    found = capabilities(capability, version)
    assert found.formats == tuple(formats.split())
    assert found.lacking.get("mxfp8") == why


# ---- CUDA through cuda-bindings ----------------------------------------------------------------------


@pytest.mark.usefixtures("newest")
def test_without_cuda_bindings_the_error_states_how_to_install_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailableError, match="cuda-bindings cannot be imported"):
        cuda.runtime()


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("runs", [0, 64, 65])
def test_each_run_has_its_own_time(runs: int):
    from fake_gpu import gpu

    lasting = iter(range(1, runs + 1))

    def work() -> None:
        gpu.now_ms += next(lasting)

    with closing(cuda.Stream()) as stream:
        timed = cuda.time_runs(stream, work, runs)
    assert timed.device_ms == tuple(range(1, runs + 1))
    assert len(timed.host_ms) == runs


@pytest.mark.usefixtures("newest")
def test_warm_up_lasts_for_the_given_runs_and_time():
    with closing(cuda.Stream()) as stream:
        assert cuda.warm_up(stream, lambda: None, 0, 0) == 0
        assert cuda.warm_up(stream, lambda: None, 7, 0) == 7
        assert cuda.warm_up(stream, lambda: None, 1, 5) > 1
