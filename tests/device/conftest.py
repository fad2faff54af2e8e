"""Tests on hardware, by ``pytest tests/device --qdq-backend=tensorrt``. Without one they skip, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdqspec.backends import _cuda
from qdqspec.errors import BackendError
from qdqspec.measure.isolate import Isolated

GPU_BACKENDS = ("tensorrt", "trtexec")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[Isolated]:
    """The backend named on the command line, its engines in child processes."""
    name = request.config.getoption("qdq_backend")
    if name not in GPU_BACKENDS:
        pytest.skip("no GPU backend was named: pytest tests/device --qdq-backend=tensorrt")
    with Isolated(name) as backend:
        found = backend.probe()
        if not found.usable:
            pytest.skip(f"{name} is not usable here: {found.why}; {found.install}")
        yield backend


@pytest.fixture(scope="session")
def tensorrt(device: Isolated) -> Isolated:
    """The Python API, for what trtexec does not offer."""
    if device.name != "tensorrt":
        pytest.skip("this is about the Python API: pytest tests/device --qdq-backend=tensorrt")
    return device


@pytest.fixture(scope="session")
def gpu() -> _cuda.Device:
    """A GPU that CUDA can use, whatever else is installed."""
    try:
        if not _cuda.count_devices():
            pytest.skip("CUDA finds no GPU")
        _cuda.select(0)
        return _cuda.describe(0)
    except BackendError as error:
        pytest.skip(f"CUDA cannot be used: {error}")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where builds of one test leave their timing cache and records."""
    return tmp_path / "state"
