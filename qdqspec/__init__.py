"""qdqspec: declarative test and tune of Q/DQ placement in ONNX models.

The names below load on first use, so that ``import qdqspec`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdqspec.app.api import compare, find_culprits, find_regions, measure, render, tune, verify
    from qdqspec.app.session import Session
    from qdqspec.app.session.result import Result
    from qdqspec.app.session.study import Study
    from qdqspec.errors import QdqspecError
    from qdqspec.spec.models import Spec, load_spec

__version__ = "0.1.0"

_HOMES = {
    "QdqspecError": "qdqspec.errors",
    "Result": "qdqspec.app.session.result",
    "Session": "qdqspec.app.session",
    "Spec": "qdqspec.spec.models",
    "Study": "qdqspec.app.session.study",
    "load_spec": "qdqspec.spec.models",
}  # of all other names: qdqspec.app.api

__all__ = [
    "QdqspecError",
    "Result",
    "Session",
    "Spec",
    "Study",
    "__version__",
    "compare",
    "find_culprits",
    "find_regions",
    "load_spec",
    "measure",
    "render",
    "tune",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, "qdqspec.app.api")), name)
    raise AttributeError(f"module 'qdqspec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
