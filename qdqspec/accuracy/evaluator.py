"""The SQNR of a candidate: on the first samples of the data during a search, on all of it before it is selected.

The outputs of the reference are computed once and held.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Any, Protocol

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec.accuracy.compare import judged, noise_power, power_of, require_numbers, signal_power, sqnr_db
from qdqspec.accuracy.data import without_fill
from qdqspec.types import EXACT_DB, Placement

SAMPLES = 8  # the first ones, on which every candidate is measured: more predict all data better
HELD_BYTES = 64 << 20  # of the outputs of the reference


class Runs(Protocol):
    """The part of an engine's interface that runs it."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""

    def close(self) -> None:
        """Stop it."""


def outputs_of(engine: Runs, feeds: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
    """The outputs for each of these inputs, in order; an engine with a method ``run_each`` runs several at once."""
    run_each = getattr(engine, "run_each", None)
    return map(engine.run, feeds) if run_each is None else run_each(feeds)


class Evaluator:
    """Measures the SQNR of an engine's worst output, in dB, against the reference's on the same samples.

    An output that is not finite or of another shape counts as -200 dB. Samples that only fill up the last feed do not
    count. ``reference`` builds the model to compare with, which runs on a sample when that is needed, and again if its
    outputs exceed `HELD_BYTES`. At most ``samples`` of the ``feeds`` are used, of which `SAMPLES` are the first ones.
    ``seconds`` is the time that an engine above a limit may take for all data. If all data takes longer, a part of it
    may decide; see `Powers.is_decided`.
    """

    def __init__(
        self,
        feeds: Iterable[Mapping[str, Array]],
        reference: Callable[[], Runs],
        samples: int = SAMPLES,
        *,
        seconds: float = math.inf,
    ) -> None:
        self._feeds, self._reference, self._seconds = feeds, reference, seconds
        self._held: dict[int, Mapping[str, Array]] = {}
        self._bytes = 0
        self._first = list(islice(feeds, min(SAMPLES, samples)))
        with closing(reference()) as engine:
            outputs = [self._hold(number, engine.run(feed)) for number, feed in enumerate(self._first)]
        require_numbers(list(zip(self._first, outputs, strict=True)))
        self.few = len(self._first)
        self.samples = samples if self.few == SAMPLES else self.few

    def __call__(self, engine: Runs) -> float:
        """The SQNR on all samples."""
        return self._run(engine, self.samples).worst_db

    def first(self, engine: Runs) -> float:
        """The SQNR on the first samples."""
        return self._run(engine, self.few).worst_db

    def by_output(self, engine: Runs) -> dict[str, float]:
        """The SQNR of each output that counts on the first samples."""
        return self._run(engine, self.few).by_output

    def near(self, engine: Runs, limit_db: float) -> tuple[float, bool]:
        """The SQNR, and whether it is that of all samples: none more runs once it is below the limit for sure.

        The samples so far decide when their number is twice that of the first ones, four times and so on. They decide
        that an SQNR is above the limit only where all would take more than the time for one engine: a few samples may
        have most of the noise.
        """
        started = time.monotonic()

        def is_enough(found: Powers) -> bool:
            times, rest = divmod(found.samples, self.few)
            if rest or times < 2 or times.bit_count() > 1:
                return False
            whole_seconds = (time.monotonic() - started) * self.samples / found.samples
            return found.is_decided(limit_db, above=whole_seconds > self._seconds)

        found = self._run(engine, self.samples, is_enough)
        return found.worst_db, found.samples >= self.samples

    def _run(
        self, engine: Runs, samples: int, is_enough: Callable[[Powers], bool] = lambda _: False
    ) -> Powers:
        """The powers on the first ``samples``, or on as many of these as are enough."""
        found, reference = Powers(), None
        feeds, again = tee(self._first if samples <= self.few else islice(self._feeds, samples))
        with ExitStack() as opened:
            for number, outputs in enumerate(outputs_of(engine, feeds)):
                feed, expected = next(again), self._held.get(number)
                if expected is None:
                    reference = reference or opened.enter_context(closing(self._reference()))
                    expected = self._hold(number, reference.run(feed))
                found.add(expected, without_fill(self._feeds, number, outputs))
                if is_enough(found):
                    break
        return found

    def _hold(self, number: int, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs of the reference for a sample, held unless they take too much memory."""
        outputs = without_fill(self._feeds, number, outputs)
        size = sum(value.nbytes for value in outputs.values())
        if self._bytes + size <= HELD_BYTES:
            self._bytes += size
            self._held[number] = outputs
        return outputs


@dataclass(slots=True)
class Powers:
    """Signal and noise power of each float output by sample; without one, of the others, such as images of integers."""

    powers: dict[Any, list[tuple[float, float]]] = field(default_factory=dict)
    samples: int = 0

    def add(self, expected: Mapping[Any, Array], seen: Mapping[Any, Array]) -> None:
        """Add the outputs of one sample, by name or edge. Changes this object."""
        self.samples += 1
        for name, values in judged(expected).items():
            powers = signal_power(values), noise_power(values, seen.get(name))
            self.powers.setdefault(name, []).append(powers)

    @property
    def by_output(self) -> dict[str, float]:
        """The SQNR of each output that counts, over all samples."""
        return {
            name: float(np.clip(sqnr_db(*map(sum, zip(*powers, strict=True))), -EXACT_DB, EXACT_DB))
            for name, powers in self.powers.items()
        }

    @property
    def worst_db(self) -> float:
        """The SQNR of the worst output."""
        return min(self.by_output.values(), default=EXACT_DB)

    def without(self, sample: int) -> Powers:
        """The powers on all other samples."""
        others = {name: powers[:sample] + powers[sample + 1 :] for name, powers in self.powers.items()}
        return Powers(others, self.samples - 1)

    def is_decided(self, limit_db: float, *, above: bool, errors: float = 4.0, near_db: float = 0.5) -> bool:
        """Whether these samples show that the worst output's SQNR over all is below a limit, or that it is above.

        The mean over samples is ``errors`` standard errors from the limit then, and the SQNR is not within ``near_db``
        of it: fewer errors and a smaller distance decide sooner, and more often wrongly.
        """
        if abs(self.worst_db - limit_db) < near_db:
            return False
        beyond = []  # the bounds of the mean of each output's noise that is more than the limit allows
        for powers in self.powers.values():
            signal, noise = np.array(powers).T
            excess = noise - power_of(limit_db) * signal
            if np.isfinite(excess).all():
                mean, reach = excess.mean(), errors * excess.std(ddof=1) / len(excess) ** 0.5
                beyond.append((mean - reach, mean + reach))
            else:
                beyond.append((-np.inf, np.inf))
        return any(low > 0 for low, _ in beyond) or (above and all(high < 0 for _, high in beyond))


@dataclass(slots=True)
class Offset:
    """The SQNR of placements minus the one expected: on all data minus on the first samples, or built minus rehearsed.

    ``known`` has the expected and the found SQNR of each placement of which both are known. With ``prior`` an offset of
    zero counts as one more placement, so that one unusual placement does not exclude all others.

    An offset is estimated from the ``nearest`` placements, those with the most similar SQNR: fewer follow it more
    closely, and a single one of them changes it more. If all are up to ``small_db``, placements need not be measured
    on all data one by one. Its deviation is ``first_doubt_db`` while it is known of fewer than two placements, and at
    least and at most ``doubts_db``, because few placements do not show it: more doubt builds candidates that miss the
    limit, less of it excludes some that keep it.
    """

    prior: bool = False
    nearest: int = 5
    small_db: float = 2.0
    first_doubt_db: float = 0.5
    doubts_db: tuple[float, float] = (0.1, 2.0)
    known: dict[Placement, tuple[float, float]] = field(default_factory=dict)

    def learn(self, expected_db: float, found_db: float, placement: Placement) -> None:
        """Add a placement of which both are known."""
        self.known[placement] = expected_db, found_db

    def at(self, expected_db: float, placement: Placement | None = None) -> float:
        """The offset of a placement: its own if that is known, else the median of those with the nearest SQNR."""
        if placement is not None and placement in self.known:
            own, found = self.known[placement]
            return found - own
        near = sorted(self.known.values(), key=lambda pair: abs(pair[0] - expected_db))[: self.nearest]
        offsets = [found - own for own, found in near] + [0.0] * (self.prior or not near)
        return float(np.median(offsets))

    @property
    def is_small(self) -> bool:
        """Whether offsets are known and all small."""
        offsets = (abs(found - own) for own, found in self.known.values())
        return max(offsets, default=math.inf) <= self.small_db

    @property
    def doubt_db(self) -> float:
        """The standard deviation of the SQNR of a placement that the offset does not explain, within bounds."""
        if len(self.known) < 2:
            return self.first_doubt_db
        errors = [found - own - self.at(own) for own, found in self.known.values()]
        return float(np.clip(np.std(errors[-2 * self.nearest :]), *self.doubts_db))
