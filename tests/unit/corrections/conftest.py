"""Processors whose sums of 8-bit products saturate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqspec.backends.onnxruntime.engine import OnnxRuntime


@pytest.fixture
def saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have 7 bits on every processor, except where 8 bits are proved not to overflow."""
    own = OnnxRuntime.capabilities
    monkeypatch.setattr(
        OnnxRuntime, "capabilities", lambda *given, **more: replace(own(*given, **more), reduce_range=True)
    )
