"""qdqspec: declare what must hold of a quantized ONNX model; have it searched, proved and gated.

The names below load on first use, so that ``import qdqspec`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdqspec.errors import QdqspecError
    from qdqspec.session import Session
    from qdqspec.spec.load import load_spec
    from qdqspec.spec.models import Spec

__version__ = "0.1.0"

_HOME = {
    "QdqspecError": "qdqspec.errors",
    "Session": "qdqspec.session",
    "Spec": "qdqspec.spec.models",
    "load_spec": "qdqspec.spec.load",
}

__all__ = ["QdqspecError", "Session", "Spec", "__version__", "load_spec"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qdqspec' has no attribute '{name}'")
