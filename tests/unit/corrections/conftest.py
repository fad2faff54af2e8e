"""Sessions on ONNX Runtime, and processors whose sums of 8-bit products saturate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec.app.session import Session
from qdqspec.backends.onnxruntime.engine import OnnxRuntime


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(root=tmp_path) as opened:
        yield opened


@pytest.fixture
def saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have 7 bits on every processor, except where 8 bits are proved not to overflow."""
    own = OnnxRuntime.capabilities
    monkeypatch.setattr(
        OnnxRuntime, "capabilities", lambda *given, **more: replace(own(*given, **more), reduce_range=True)
    )
