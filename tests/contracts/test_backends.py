"""Runs the shipped backend contract over the built-in backends that work without a device."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import Backend
from qdqspec.registry import resolve
from qdqspec.testing.backends import BackendContract


class TestOnnxRuntime(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return resolve("backend", "onnxruntime")()


class TestFake(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return resolve("backend", "fake")()
