"""Spec files: read, validated and expanded into cases. Opens YAML only, no model.

- `Spec`: a spec as Python writes it. `load_spec` reads a file.
"""

from __future__ import annotations

from qdqspec.spec.models import Spec, load_spec

__all__ = ["Spec", "load_spec"]
