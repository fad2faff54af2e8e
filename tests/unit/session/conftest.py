"""Sessions whose engines are threads, except in tests with the fixture ``processes``."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads: None) -> None:
    """A session starts dozens of engines, and few of these tests need engines in separate processes."""
