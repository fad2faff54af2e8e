"""Statistics of a model's outputs on its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from qdqspec.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """The mean power of an output's values, and their bounds.

    An input with weaker outputs is judged against these. A quantization step is as large for an input of
    zeros as for any other, so that relative to its own outputs it would exceed each limit.
    """

    power: float = 0.0
    low: float = 0.0
    high: float = 0.0
    finite: bool = True  # whether no value was NaN or infinite


def typical_of(runs: Iterable[Mapping[str, Array]]) -> dict[str, Typical]:
    """The statistics of each float output over all runs; values that are not finite do not count."""
    powers: dict[str, float] = {}
    counts: dict[str, int] = {}
    odd: set[str] = set()
    bounds: dict[str, tuple[float, float]] = {}
    for outputs in runs:
        for name, array in outputs.items():
            if np.issubdtype(array.dtype, np.floating):
                values = array[np.isfinite(array)].astype(np.float64)
                odd |= {name} if values.size < array.size else set()
                low, high = bounds.get(name, (0.0, 0.0))
                bounds[name] = min(values.min(initial=low), low), max(values.max(initial=high), high)
                powers[name] = powers.get(name, 0.0) + float(np.square(values).sum())
                counts[name] = counts.get(name, 0) + values.size
    return {
        name: Typical(
            power=powers[name] / max(counts[name], 1),
            low=float(low),
            high=float(high),
            finite=name not in odd,
        )
        for name, (low, high) in bounds.items()
    }
