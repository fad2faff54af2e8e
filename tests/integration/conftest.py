"""The compiler of TensorRT for RTX, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from installed import require_rtx

from qdqspec.backends.isolation.isolated import Isolated


@pytest.fixture(scope="module")
def compiler() -> Iterator[Isolated]:
    require_rtx()
    with closing(Isolated("tensorrt-rtx")) as backend:
        yield backend
