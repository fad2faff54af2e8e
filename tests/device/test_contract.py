"""The backend contract on hardware."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.testing.backends import BackendContract

pytestmark = pytest.mark.gpu


class TestOnDevice(BackendContract):
    @pytest.fixture
    def backend(self, device: Isolated) -> Backend:
        return device

    @pytest.fixture
    def options(self, chosen: BuildOptions) -> BuildOptions:
        return chosen
