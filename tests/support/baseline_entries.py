"""Entries of baselines for tests of what compares, lists, renews and removes them."""

from __future__ import annotations

from typing import Any

from qdqspec.app.evidence.baselines import Entry, RoleTimes
from qdqspec.types import Interval


def entry_of(
    ratio: float = 0.574, wall: tuple[tuple[float, ...], ...] = ((1.0, 1.0),), **fields: Any
) -> Entry:
    """An entry of this ratio, whose builds took these times on both clocks."""
    times = RoleTimes(wall_ms=wall, cpu_ms=wall)
    known = {
        "clock": "wall",
        "model_sha256": "a" * 64,
        "rules": {"quantize.format": "int8"},
        "scheme": "0123",
        "environment": {"onnxruntime": "1.31.1"},
        "recorded": "2026-01-08T14:00:00+00:00",
    }
    interval = Interval(median=ratio, low=ratio - 0.01, high=ratio + 0.01)
    return Entry(ratio=interval, samples={"tuned": times, "reference": times}, **known | fields)
