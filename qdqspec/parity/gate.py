"""The SQNR of a candidate: on a few samples during a search, on all data before it is selected.

For the few samples the reference's outputs are kept; all data is run through both models, sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol

import numpy as np

from qdqspec.arrays import Array
from qdqspec.backends.base import Engine
from qdqspec.parity.compare import noise_power, signal_power, sqnr_db
from qdqspec.types import EXACT_DB

SAMPLES = 8
HELD_BYTES = 64 << 20  # of the reference's outputs on all data
FEW = 2
# Samples after which an SQNR may be far from a limit: the distance until their error is known, and the least.
STEPS = {FEW: (6.0, 1.0), 4: (3.0, 0.5)}
KNOWN, SURE = 4, 3.0  # engines run on all samples after which the error is known, and deviations that are far
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
        # SQNR on all samples minus that on the first ones, by the number of these
        self._differences: dict[int, list[float]] = {
            number: [] for number in STEPS if number < len(self._pairs)
        }

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

    def first(self, engine: Runs) -> float:
        """The SQNR of the worst output on the first `FEW` samples."""
        pairs = ((expected, engine.run(feed)) for feed, expected in self._pairs[:FEW])
        return min(_by_output(pairs).values(), default=MOST_DB)

    def near(self, engine: Runs, limit_db: float) -> tuple[float, int]:
        """The SQNR of the worst output, and the number of samples that were run.

        Those are the first ones, as many as the steps, if the SQNR on all that is expected from these is far from the
        limit, else all. What is far follows from the engines that were run on all samples before.
        """
        found, at = _Powers(), dict[int, float]()
        for number, (feed, expected) in enumerate(self._pairs, 1):
            found.add(expected, engine.run(feed))
            if number in self._differences:
                at[number], known = found.worst_db, self._differences[number]
                expected_db = at[number] + float(np.median(known or [0.0]))
                if abs(expected_db - limit_db) > _far(number, known):
                    return expected_db, number
        for number, few_db in at.items():
            self._differences[number].append(found.worst_db - few_db)
        return found.worst_db, self.samples


def _far(samples: int, known: Sequence[float]) -> float:
    """The distance from a limit that counts as far, by the differences of all samples from so many."""
    first, least = STEPS[samples]
    return first if len(known) < KNOWN else max(least, min(first, SURE * float(np.std(known))))


class AllData:
    """The SQNR of an engine's worst output over all of ``feeds``; ``reference`` builds the model to compare with.

    Where the reference's outputs take at most `HELD_BYTES`, they are kept; else it runs again each time.
    """

    def __init__(self, feeds: Iterable[Mapping[str, Array]], reference: Callable[[], Engine]) -> None:
        self._feeds = feeds
        self._reference = reference
        self._held: list[Mapping[str, Array]] | None = None  # the reference's outputs, of all samples

    def __call__(self, engine: Runs) -> float:
        """Run the engine on every sample."""
        if self._held is not None:
            pairs = zip(self._held, map(engine.run, self._feeds), strict=True)
            return min(_by_output(pairs).values(), default=MOST_DB)
        kept = _Kept()
        with closing(self._reference()) as reference:
            found = _by_output((kept.add(reference.run(feed)), engine.run(feed)) for feed in self._feeds)
        self._held = kept.outputs
        return min(found.values(), default=MOST_DB)


class _Kept:
    """Outputs that are kept, all or none."""

    def __init__(self) -> None:
        self.outputs: list[Mapping[str, Array]] | None = []
        self._bytes = 0

    def add(self, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Keep the outputs of one more sample, unless they are too large; returns them."""
        self._bytes += sum(value.nbytes for value in outputs.values())
        if self._bytes > HELD_BYTES:
            self.outputs = None
        if self.outputs is not None:
            self.outputs.append(outputs)
        return outputs


def _by_output(runs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]]) -> dict[str, float]:
    """The SQNR of each float output, over all (reference, candidate) outputs."""
    found = _Powers()
    for expected, seen in runs:
        found.add(expected, seen)
    return found.by_output


class _Powers:
    """Signal and noise power of each float output, summed over samples."""

    def __init__(self) -> None:
        self._signal: dict[str, float] = {}
        self._noise: dict[str, float] = {}

    def add(self, expected: Mapping[str, Array], seen: Mapping[str, Array]) -> None:
        """Add the outputs of one sample. Changes this object."""
        for name, values in expected.items():
            if np.issubdtype(values.dtype, np.floating):
                self._signal[name] = self._signal.get(name, 0.0) + signal_power(values)
                self._noise[name] = self._noise.get(name, 0.0) + noise_power(values, seen.get(name))

    @property
    def by_output(self) -> dict[str, float]:
        """The SQNR of each float output."""
        return {
            name: float(np.clip(sqnr_db(signal, self._noise[name]), -MOST_DB, MOST_DB))
            for name, signal in self._signal.items()
        }

    @property
    def worst_db(self) -> float:
        """The SQNR of the worst output."""
        return min(self.by_output.values(), default=MOST_DB)
