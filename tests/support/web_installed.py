"""Skips tests of backend `onnxruntime-web` where it is not usable."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import PLAIN, BuildOptions
from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb


def require_web(options: BuildOptions = PLAIN) -> None:
    """Skip the calling test, with the reason, if Node, a package or the requested browser is missing."""
    availability = OnnxRuntimeWeb().probe(options)
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
