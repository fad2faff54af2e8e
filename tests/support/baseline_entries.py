"""Entries of baselines for tests of what lists, renews and removes them."""

from __future__ import annotations

from qdqspec.checks.baselines import Entry, RoleTimes
from qdqspec.types import Interval


def entry_of(ratio: float = 0.574) -> Entry:
    """An entry of this ratio."""
    times = RoleTimes(wall_ms=((1.0, 1.0),))
    return Entry(
        ratio=Interval(median=ratio, low=ratio - 0.01, high=ratio + 0.01),
        clock="wall",
        samples={"tuned": times, "reference": times},
        model_sha256="a" * 64,
        rules={"quantize.format": "int8"},
        scheme="0123",
        environment={"onnxruntime": "1.31.1"},
        recorded="2026-01-08T14:00:00+00:00",
    )
