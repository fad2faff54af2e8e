"""The operators and formats that TensorRT for RTX quantizes, by compute capability."""

from __future__ import annotations

from collections.abc import Collection

from qdqspec.backends.base import Capabilities
from qdqspec.backends.tensorrt import ops


def capabilities(compute: Collection[tuple[int, int]]) -> Capabilities:
    """The capabilities of GPUs of all these compute capabilities."""
    return ops.capabilities(min(compute), (11, 4))
