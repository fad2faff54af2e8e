"""Tests on hardware: ``pytest tests/device --qdq-backend=tensorrt``. Without hardware they skip with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdqspec.app.plugin.state import settings_of
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt import cuda
from qdqspec.errors import BackendError

GPU_BACKENDS = ("tensorrt", "tensorrt-rtx", "trtexec")


@pytest.fixture(scope="session")
def chosen(request: pytest.FixtureRequest) -> BuildOptions:
    """The build options of the command line: ``--qdq-device``, ``--qdq-backend-option``, ``--qdq-plugin``."""
    return BuildOptions.of(settings_of(request.config))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, chosen: BuildOptions) -> Iterator[Isolated]:
    """The backend named on the command line, its engines in child processes."""
    name = request.config.getoption("qdq_backend")
    if name not in GPU_BACKENDS:
        pytest.skip("no GPU backend was named: pytest tests/device --qdq-backend=tensorrt")
    with Isolated(name) as backend:
        found = backend.probe(chosen)
        if not found.usable:
            pytest.skip(f"{name} is not usable here: {found.why}; {found.install}")
        yield backend


@pytest.fixture(scope="session")
def tensorrt(device: Isolated, chosen: BuildOptions) -> Isolated:
    """A product with TensorRT's Python API, for tests of functions that trtexec does not offer."""
    if device.name == "trtexec":
        pytest.skip("this is about the Python API: pytest tests/device --qdq-backend=tensorrt")
    found = device.probe(chosen)
    if not device.capabilities(chosen).runs:
        pytest.skip(f"{device.name} only builds on this machine: {found.facts['gpu']}")
    return device


@pytest.fixture(scope="session")
def gpu(chosen: BuildOptions) -> cuda.Gpu:
    """A GPU that CUDA can use, independent of TensorRT."""
    try:
        if cuda.count_devices() <= chosen.device:
            pytest.skip(f"CUDA finds no GPU {chosen.device}")
        cuda.select(chosen.device)
        return cuda.describe(chosen.device)
    except BackendError as error:
        pytest.skip(f"CUDA cannot be used: {error}")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder for timing cache and records of the builds of one test."""
    return tmp_path / "state"
