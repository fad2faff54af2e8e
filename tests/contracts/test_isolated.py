"""An isolated backend fulfils the backend contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installed import require_openvino

from qdqspec.backends.base import Backend
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.testing.backends import BackendContract


@pytest.fixture(scope="module", params=["onnxruntime", "fake", "openvino"])
def isolated(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Engines of ``fake`` in new interpreters, the others in forked processes."""
    if request.param == "openvino":
        require_openvino()
    with Isolated(request.param, fork=False if request.param == "fake" else None) as backend:
        yield backend


class TestIsolated(BackendContract):
    @pytest.fixture
    def backend(self, isolated: Backend) -> Backend:
        return isolated
