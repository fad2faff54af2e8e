"""Tests run without the environment variables of CI runners, of pytest and of colours."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

NAMES = ("CI", "PYTEST_ADDOPTS", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """A test of such a variable sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in NAMES or name.startswith("GITHUB_"):
                patch.delenv(name)
        yield
