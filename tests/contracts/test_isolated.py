"""An isolated backend fulfils the backend contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openvino_installed import require_openvino

from qdqspec.backends.base import Backend
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.testing.backends import BackendContract


@pytest.fixture(scope="module")
def forked() -> Iterator[Backend]:
    with Isolated("onnxruntime") as backend:
        yield backend


@pytest.fixture(scope="module")
def started() -> Iterator[Backend]:
    with Isolated("fake", fork=False) as backend:
        yield backend


@pytest.fixture(scope="module")
def openvino() -> Iterator[Backend]:
    require_openvino()
    with Isolated("openvino") as backend:
        yield backend


class TestIsolatedOnnxRuntime(BackendContract):
    @pytest.fixture
    def backend(self, forked: Backend) -> Backend:
        return forked


class TestIsolatedFake(BackendContract):
    @pytest.fixture
    def backend(self, started: Backend) -> Backend:
        return started


class TestIsolatedOpenVino(BackendContract):
    @pytest.fixture
    def backend(self, openvino: Backend) -> Backend:
        return openvino
