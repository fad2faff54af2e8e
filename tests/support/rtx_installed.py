"""Skips tests of backend `tensorrt-rtx` where its compiler is not installed."""

from __future__ import annotations

import pytest

from qdqspec.backends.tensorrt_rtx.engine import TensorRtRtx


def require_rtx() -> None:
    """Skip the calling test, with the reason, if the compiler is not usable."""
    availability = TensorRtRtx().probe()
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
