"""The backend contract, on a fake TensorRT of every supported version; see also ``test_tensorrt_session.py``."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import Backend
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.testing.backends import BackendContract


class TestTensorRt(BackendContract):
    @pytest.fixture
    def backend(self, tensorrt_version: str) -> Backend:
        backend = TensorRt()
        assert backend.target == f"tensorrt-{tensorrt_version[:2]}"
        return backend
