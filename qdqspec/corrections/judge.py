"""The error by which corrections are accepted: rehearsed at the guiding tensors, on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Literal, TypeAlias

import numpy as np

from qdqspec.arrays import Array, Feed, Floats
from qdqspec.graph.model import Model
from qdqspec.parity.compare import noise_power, signal_power
from qdqspec.parity.gate import MOST_DB
from qdqspec.placement.space.units import Edge
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.rehearsal import Rehearsal, Runtime, Subject
from qdqspec.rehearsal.graph import Values
from qdqspec.types import Placement

SampleSplit: TypeAlias = Literal["fit", "held-out"]

MIN_SAMPLES = 4  # of both parts together; fewer cannot be split
LEAST_SAMPLES = 2  # that a judgement is based on, also where a run takes long
TINY = 1e-30  # lower bound of powers
USABLE_DB = 10.0  # below it, a few pairs dominate the outputs, and gains or losses are not meaningful
LEAST_DB = 0.1  # smallest mean gain over placements
MOST_LOSS_DB = 0.05  # largest loss of any placement


@dataclass(slots=True, kw_only=True)
class Judge:
    """Rehearses placements with other numbers. Even samples are for finding corrections, odd ones for judging them.

    More ``samples`` of each part find rarer losses, and take the time of a run for each placement. The last rehearsal
    stays open: other numbers of activations are inputs of its model.
    """

    model: Model
    placements: tuple[Placement, ...]
    feeds: Callable[[], Iterable[Feed]]
    runtime: Runtime
    samples: int = 12
    rounds_biases: frozenset[str] = frozenset()  # as in `qdqspec.backends.base.Capabilities`
    _open: tuple[Quantizer, Rehearsal] | None = field(default=None, init=False)

    def part(self, part: SampleSplit, samples: int | None = None) -> Iterator[Feed]:
        """The first ``samples`` of a part, by default those that placements are judged on."""
        return islice(self.feeds(), int(part == "held-out"), 2 * (samples or self.samples), 2)

    def errors(self, numbers: Quantizer, is_late: Callable[[], bool] = lambda: False) -> tuple[Errors, ...]:
        """The held-out error of each placement. Once it ``is_late``, the samples so far are those of all judgements."""
        rehearsal, adjusted = self._rehearsal(numbers)
        settings = [rehearsal.switches.setting(placement) for placement in self.placements]
        rows: list[list[Floats]] = [[] for _ in settings]
        outputs: list[list[Floats]] = [[] for _ in settings]
        samples, references = tee(islice(rehearsal.references(), self.samples))
        runs = ((setting, feed) for feed, _ in samples for setting in settings)
        each = rehearsal.values_each(runs, adjusted)
        for _, reference in references:
            for row, own, values in zip(rows, outputs, each, strict=False):
                row.append(powers_at(rehearsal.guiding_edges, reference, values))
                own.append(powers_at(rehearsal.outputs_edges, reference, values))
            if len(rows[0]) >= LEAST_SAMPLES and is_late():
                self.samples = len(rows[0])
                break
        return tuple(Errors(np.array(row), np.array(own)) for row, own in zip(rows, outputs, strict=True))

    def of_model(self, model: Model) -> Judge:
        """A judge of the same placements of another model."""
        return Judge(
            model=model,
            placements=self.placements,
            feeds=self.feeds,
            runtime=self.runtime,
            samples=self.samples,
            rounds_biases=self.rounds_biases,
        )

    def close(self) -> None:
        """Close the open rehearsal."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _rehearsal(self, numbers: Quantizer) -> tuple[Rehearsal, Mapping[str, Array]]:
        """The open rehearsal if it has these weights, else a new one, and the numbers to run it with."""
        if self._open is not None:
            old, rehearsal = self._open
            mine, its = numbers.corrections, old.corrections
            has_equal_weights = mine.weights is its.weights and mine.biases is its.biases
            adjusted = rehearsal.adjusted(numbers) if has_equal_weights else None
            if adjusted is not None:
                return rehearsal, adjusted
        self.close()
        subject = Subject(
            model=self.model,
            sites=tuple(dict.fromkeys(site for placement in self.placements for site in placement.ordered)),
            numbers=numbers,
            feeds=lambda: self.part("held-out"),
            samples=self.samples,
            data="calibration",
            rounds_biases=self.rounds_biases,
        )
        self._open = numbers, Rehearsal(subject, self.runtime, adjustable=True)
        return self._open[1], {}


@dataclass(frozen=True, slots=True)
class Errors:
    """Signal and noise power of one placement by sample and guiding tensor: (sample, tensor, 2).

    ``outputs`` are the same at the outputs of the model, for which a limit holds.
    """

    powers: Floats
    outputs: Floats | None = None

    @property
    def total_db(self) -> float:
        """The SQNR over all samples at the worst tensor."""
        return float(_db(self.powers.sum(axis=0)).min(initial=MOST_DB))

    @property
    def least_db(self) -> float:
        """The smaller of the SQNR at the worst guiding tensor and at the worst output."""
        return self.total_db if self.outputs is None else min(self.total_db, Errors(self.outputs).total_db)

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


def is_gain(after: Iterable[Errors], before: Iterable[Errors]) -> bool:
    """Whether placements with usable outputs gain in the mean, and none loses.

    Their mean is no loss without any single sample either, whose gain may be chance.
    """
    pairs = [
        (new, old)
        for new, old in zip(after, before, strict=True)
        if max(new.total_db, old.total_db) >= USABLE_DB and new.gain_db(old)
    ]
    gains = [new.gain_db(old) for new, old in pairs]
    if not gains or sum(gains) / len(gains) < LEAST_DB or min(gains) < -MOST_LOSS_DB:
        return False
    without = np.mean([new.gains_without_db(old) for new, old in pairs], axis=0)
    return float(without.min()) >= -MOST_LOSS_DB


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
