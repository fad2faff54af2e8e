"""Verbs run their engines as threads."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads):
    """Runs engines as threads, unless a test uses ``processes``."""
