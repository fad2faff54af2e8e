"""Skips tests of TensorRT for RTX where it is not installed."""

from __future__ import annotations

import pytest

from qdqspec.backends.tensorrt.device import RTX, look


def require_rtx() -> None:
    """Skip the calling test, with the command that installs it, if TensorRT for RTX cannot be used."""
    found = look(RTX)
    if found.why:
        pytest.skip(f"{found.why}; {found.install or RTX.install}")
