"""The backend contract, on a fake TensorRT of every supported version, in this process and in child processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdqspec.backends.base import Backend
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.testing.backends import BackendContract


class TestTensorRt(BackendContract):
    @pytest.fixture
    def backend(self, tensorrt_version: str) -> Backend:
        backend = TensorRt()
        assert backend.target == f"tensorrt-{tensorrt_version[:2]}"
        return backend


class TestIsolatedTensorRt(BackendContract):
    @pytest.fixture
    def backend(self, install_tensorrt) -> Iterator[Backend]:
        install_tensorrt("11.4.0.106")
        with Isolated("tensorrt") as backend:
            yield backend
