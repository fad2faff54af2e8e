"""Runs the backend contract over every registered backend; tests that need an unavailable device are skipped."""

from __future__ import annotations

import pytest

from qdqspec._core import registry
from qdqspec.backends.base import Backend
from qdqspec.testing.backends import BackendContract


class TestRegistered(BackendContract):
    @pytest.fixture(params=registry.names("backend"))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return registry.resolve("backend", request.param)()
