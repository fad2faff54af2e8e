"""The SQNR of a candidate: on a few samples during a search, on all data before it is selected.

For the few samples the reference's outputs are kept; all data is run through both models, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from qdqspec.backends.base import Array, Engine
from qdqspec.parity.compare import sqnr_db
from qdqspec.types import EXACT_DB

SAMPLES = 8
MOST_DB = EXACT_DB  # finite value for equal outputs: JSON has no infinity


class Runs(Protocol):
    """The part of an engine's interface that runs it."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        ...


class OutputGate:
    """Measures the SQNR of an engine's worst output, in dB, against the reference's on the same samples."""

    def __init__(self, reference: Runs, feeds: Iterable[Mapping[str, Array]], samples: int = SAMPLES) -> None:
        self._pairs = [(feed, reference.run(feed)) for feed in islice(feeds, samples)]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._pairs)

    def __call__(self, engine: Runs) -> float:
        """Run an engine on the samples; an output that is not finite or of another shape counts as -200 dB."""
        return min(self.by_output(engine).values(), default=MOST_DB)

    def by_output(self, engine: Runs) -> dict[str, float]:
        """The SQNR of each float output."""
        return _by_output((expected, engine.run(feed)) for feed, expected in self._pairs)


@dataclass(frozen=True, slots=True)
class AllData:
    """The SQNR of an engine's worst output over all of ``feeds``; ``reference`` builds the model to compare with."""

    feeds: Iterable[Mapping[str, Array]]
    reference: Callable[[], Engine]

    def __call__(self, engine: Runs) -> float:
        """Run both on each sample; nothing is kept."""
        with closing(self.reference()) as reference:
            found = _by_output((reference.run(feed), engine.run(feed)) for feed in self.feeds)
        return min(found.values(), default=MOST_DB)


def _by_output(runs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]]) -> dict[str, float]:
    """The SQNR of each float output, over all (reference, candidate) outputs."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for expected, seen in runs:
        for name, values in expected.items():
            if np.issubdtype(values.dtype, np.floating):
                power, error = _powers(values, seen.get(name))
                signal[name] = signal.get(name, 0.0) + power
                noise[name] = noise.get(name, 0.0) + error
    return {name: float(np.clip(sqnr_db(signal[name], noise[name]), -MOST_DB, MOST_DB)) for name in signal}


def _powers(expected: Array, seen: Array | None) -> tuple[float, float]:
    """Signal and noise power of one output; infinite noise if it cannot be compared."""
    reference = expected.astype(np.float64)
    finite = np.isfinite(reference)
    power = float(np.square(reference[finite]).sum())
    if seen is None or seen.shape != expected.shape or not np.isfinite(seen[finite]).all():
        return power, math.inf
    return power, float(np.square(reference[finite] - seen[finite].astype(np.float64)).sum())
