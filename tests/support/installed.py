"""Skips tests of runtimes that are not usable on this machine."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import PLAIN, BuildOptions, backend_named


def require(backend: str, options: BuildOptions = PLAIN) -> None:
    """Skip the calling test, with the reason and the command that installs it, if a backend is not usable."""
    availability = backend_named(backend).probe(options)
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
