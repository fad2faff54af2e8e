"""A simulated device: seeded, by default without delays, with configurable noise and faults."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(targets=("fake",))

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
