"""Skips tests of backend `openvino` where it is not usable."""

from __future__ import annotations

import pytest

from qdqspec.backends.openvino.engine import OpenVino


def require_openvino() -> None:
    """Skip the calling test, with the reason, if OpenVINO is not usable."""
    availability = OpenVino().probe()
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
