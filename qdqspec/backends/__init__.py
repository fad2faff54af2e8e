"""Runtimes, one folder each: each builds engines of models, runs them and times their layers.

- `Backend`, `Engine`: the interface. `BuildOptions`: what a build depends on; `PLAIN`: one without options.
- `Availability`, `Capabilities`, `Exported`: what a backend tells of this machine, of Q/DQ models and of its engines.
- `Declaration`, `attributes_of`: names of a backend's parts, which load when they are used.
- `BackendOptions`: the base of a backend's options. `backend_named` finds a backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec._core.hooks import Declaration, attributes_of
from qdqspec._core.options import BackendOptions

if TYPE_CHECKING:
    from qdqspec.backends.base import (
        PLAIN,
        Availability,
        Backend,
        BuildOptions,
        Capabilities,
        Engine,
        Exported,
        backend_named,
    )

__all__ = [
    "PLAIN",
    "Availability",
    "Backend",
    "BackendOptions",
    "BuildOptions",
    "Capabilities",
    "Declaration",
    "Engine",
    "Exported",
    "attributes_of",
    "backend_named",
]

__getattr__ = attributes_of(f"{__name__}.base", *__all__)  # loads numpy, which declarations do without
