"""Skips tests of backend `onnxruntime-web` where it is not usable."""

from __future__ import annotations

import pytest

from qdqspec.backends.onnxruntime_web import OnnxRuntimeWeb


def require_web() -> None:
    """Skip the calling test, with the reason, if Node or the package is missing."""
    availability = OnnxRuntimeWeb().probe()
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
