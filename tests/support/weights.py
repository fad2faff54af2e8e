"""Modes of inserting weights: stored as integers, or float with both operators."""

from __future__ import annotations

from collections.abc import Iterable

from qdqspec.types import Site


def floating(sites: Iterable[Site], mode: str) -> frozenset[Site]:
    """The sites whose weights stay float in ``mode``: all for ``float``, none for ``integer``."""
    return frozenset(sites if mode == "float" else ())
