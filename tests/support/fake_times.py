"""Times of the simulated device without noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qdqspec.backends.fake.cost import cost_of
from qdqspec.backends.fake.engine import OPTIONS
from qdqspec.graph.model import load_model


def true_ms(model: Path, options: Mapping[str, str] | None = None) -> float:
    """The time of a run of a model in milliseconds."""
    words = OPTIONS.of(options or {})
    return cost_of(load_model(model), words.seed, words.scale, words.integer).milliseconds
