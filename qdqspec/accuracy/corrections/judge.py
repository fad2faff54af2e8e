"""The error by which corrections are accepted: rehearsed at the guiding tensors, on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Literal, TypeAlias

import numpy as np

from qdqspec._core.arrays import Feed, Floats
from qdqspec.accuracy.compare import noise_power, signal_power
from qdqspec.accuracy.gate import MOST_DB
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime, Subject
from qdqspec.accuracy.rehearsal.graph import Values
from qdqspec.graph.model import Model
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.space.units import Edge
from qdqspec.types import Placement

SampleSplit: TypeAlias = Literal["fit", "held-out"]

MIN_SAMPLES = 4  # of both parts together; fewer cannot be split
TINY = 1e-30  # lower bound of powers
USABLE_DB = 10.0  # below it, a few pairs dominate the outputs, and gains or losses are not meaningful


@dataclass(slots=True, kw_only=True)
class Judge:
    """Rehearses placements with other numbers. Even samples are for finding corrections, odd ones for judging them.

    More ``samples`` of each part find rarer losses, and take the time of a run for each placement.
    """

    model: Model
    placements: tuple[Placement, ...]
    feeds: Callable[[], Iterable[Feed]]
    runtime: Runtime
    samples: int = 12
    rounds_biases: frozenset[str] = frozenset()  # as in `qdqspec.backends.base.Capabilities`
    _known: dict[int, Values] = field(default_factory=dict, init=False)  # outputs of the float model

    def part(self, part: SampleSplit, samples: int | None = None) -> Iterator[Feed]:
        """The first ``samples`` of a part, by default those that placements are judged on."""
        return islice(self.feeds(), int(part == "held-out"), 2 * (samples or self.samples), 2)

    def errors(
        self, numbers: Quantizer, is_late: Callable[[], bool] = lambda: False, least_samples: int = 2
    ) -> tuple[Errors, ...]:
        """The held-out error of each placement.

        Once it ``is_late``, the samples so far, and not fewer than ``least_samples``, are those of all judgements.
        """
        subject = Subject(
            model=self.model,
            sites=tuple(dict.fromkeys(site for placement in self.placements for site in placement.ordered)),
            numbers=numbers,
            feeds=lambda: self.part("held-out"),
            samples=self.samples,
            data="calibration",
            rounds_biases=self.rounds_biases,
        )
        rows: list[list[Floats]] = [[] for _ in self.placements]
        with Rehearsal(subject, self.runtime, known=self._known) as rehearsal:
            settings = [rehearsal.switches.setting(placement) for placement in self.placements]
            samples, references = tee(self._until(is_late, least_samples, rehearsal.references()))
            each = rehearsal.values_each((setting, feed) for feed, _ in samples for setting in settings)
            for _, reference in references:
                for row, values in zip(rows, each, strict=False):
                    row.append(powers_at(rehearsal.guiding_edges, reference, values))
        return tuple(Errors(np.array(row)) for row in rows)

    def _until(
        self, is_late: Callable[[], bool], least: int, samples: Iterable[tuple[Feed, Values]]
    ) -> Iterator[tuple[Feed, Values]]:
        for count, sample in enumerate(samples):
            if count >= least and is_late():
                self.samples = count
                return
            yield sample


@dataclass(frozen=True, slots=True)
class Errors:
    """Signal and noise power of one placement by sample and guiding tensor: (sample, tensor, 2)."""

    powers: Floats

    @property
    def total_db(self) -> float:
        """The SQNR over all samples at the worst tensor."""
        return float(_db(self.powers.sum(axis=0)).min(initial=MOST_DB))

    def without(self, sample: int) -> Errors:
        """The errors on all other samples."""
        return Errors(np.delete(self.powers, sample, axis=0))

    def gain_db(self, before: Errors) -> float:
        """The increase of the SQNR, in dB."""
        return self.total_db - before.total_db

    def gains_without_db(self, before: Errors) -> Floats:
        """The `gain_db` without each single sample."""
        gains = [self.without(n).gain_db(before.without(n)) for n in range(len(self.powers))]
        return np.array(gains, np.float64)


def is_gain(
    after: Iterable[Errors], before: Iterable[Errors], least_db: float = 0.1, most_loss_db: float = 0.05
) -> bool:
    """Whether placements with usable outputs gain ``least_db`` in the mean, and none loses more than ``most_loss_db``.

    Their mean is no loss without any single sample either, whose gain may be chance. Smaller numbers accept more
    corrections whose gain is not that of other data.
    """
    pairs = [
        (new, old)
        for new, old in zip(after, before, strict=True)
        if max(new.total_db, old.total_db) >= USABLE_DB and new.gain_db(old)
    ]
    gains = [new.gain_db(old) for new, old in pairs]
    if not gains or sum(gains) / len(gains) < least_db or min(gains) < -most_loss_db:
        return False
    without = np.mean([new.gains_without_db(old) for new, old in pairs], axis=0)
    return float(without.min()) >= -most_loss_db


def powers_at(edges: Iterable[Edge], references: Values, values: Values) -> Floats:
    """Signal and noise power of values against references, (edge, 2). Values that are no floats count as exact.

    The noise of values that cannot be compared is infinite: a model whose loops end by its data may return others.
    """
    found = [
        (signal_power(reference), noise_power(reference, values[edge]))
        if np.issubdtype(reference.dtype, np.floating)
        else (1.0, 0.0)
        for edge, reference in ((edge, references[edge]) for edge in edges)
    ]
    return np.array(found, np.float64)


def _db(powers: Floats) -> Floats:
    signal, noise = np.maximum(powers[..., 0], TINY), np.maximum(powers[..., 1], TINY)
    ratio = np.maximum(signal / noise, TINY)  # 0 for infinite noise
    return np.asarray(np.clip(10 * np.log10(ratio), -MOST_DB, MOST_DB), np.float64)
