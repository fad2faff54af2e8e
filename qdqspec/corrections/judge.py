"""The error by which corrections are accepted: rehearsed at the guiding tensors, on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Literal, TypeAlias

import numpy as np

from qdqspec.arrays import Array, Feed, Floats
from qdqspec.closing import Closing
from qdqspec.graph.model import Model
from qdqspec.parity.compare import noise_power, signal_power
from qdqspec.parity.gate import MOST_DB
from qdqspec.placement.space.units import Edge
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.rehearsal import Rehearsal, RehearsalRefusedError, Runtime, Subject
from qdqspec.rehearsal.graph import Values
from qdqspec.types import Placement

SampleSplit: TypeAlias = Literal["fit", "held-out"]
TensorKind: TypeAlias = Literal["weights", "activations"]

SAMPLES = 12  # of each part
TINY = 1e-30  # lower bound of powers
LEAST_SAMPLES = 2  # that a judgement is based on, also where one takes long
SURE_SAMPLES = 4  # after which a correction that loses is rejected
USABLE_DB = 10.0  # below it, a few pairs dominate the outputs, and gains or losses are not meaningful
MOST_LEFT = 4  # units that are left in floating point so that the others can be judged,
LEFT_SHARE = 4  # and one in so many
MIN_SAMPLES = 4  # of both parts together; fewer cannot be split
MOST_OPEN = 2  # rehearsals

_Adjusted: TypeAlias = Mapping[str, Array]


class OpenRehearsals(Closing):
    """The last rehearsals, which are used again for other numbers of activations with the same weights."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[Quantizer, Rehearsal]] = {}

    def of(
        self, subject: object, numbers: Quantizer, opened: Callable[[], Rehearsal]
    ) -> tuple[Rehearsal, _Adjusted]:
        """The rehearsal of a subject, ``opened`` if none has these weights, and the numbers to run it with."""
        known = self._open.pop(subject, None)
        if known is not None:
            old, rehearsal = known
            mine, its = numbers.corrections, old.corrections
            has_equal_weights = mine.weights is its.weights and mine.biases is its.biases
            adjusted = rehearsal.adjusted(numbers) if has_equal_weights else None
            if adjusted is not None:
                self._open[subject] = known
                return rehearsal, adjusted
            rehearsal.close()
        while len(self._open) >= MOST_OPEN:
            self._open.pop(next(iter(self._open)))[1].close()
        try:
            found = opened()
        except RehearsalRefusedError:
            if not self._open:
                raise
            self.close()  # memory may be short
            found = opened()
        self._open[subject] = numbers, found
        return found, {}

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1][1].close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Rehearses placements with other numbers. Even samples are for finding corrections, odd ones for validation."""

    model: Model
    placements: tuple[Placement, ...]
    feeds: Callable[[], Iterable[Feed]]
    runtime: Runtime
    samples: int = SAMPLES  # of each part, at most
    rounds_biases: frozenset[str] = frozenset()  # as in `qdqspec.backends.base.Capabilities`
    known: dict[tuple[int, SampleSplit], dict[int, Values]] = field(default_factory=dict)  # of float models
    rehearsals: OpenRehearsals = field(default_factory=OpenRehearsals)

    def part(self, part: SampleSplit, samples: int | None = None) -> Iterator[Feed]:
        """The first ``samples`` of a part, by default those that placements are judged on."""
        return islice(self.feeds(), int(part == "held-out"), 2 * (samples or self.samples), 2)

    def rehearsal(self, numbers: Quantizer, part: SampleSplit) -> tuple[Rehearsal, _Adjusted]:
        """The rehearsal of a part of the samples and the adjustments of its runs for these numbers. It stays open."""
        subject = id(self.model), part, tuple(placement.digest for placement in self.placements)
        return self.rehearsals.of(subject, numbers, lambda: self._opened(numbers, part))

    def _opened(self, numbers: Quantizer, part: SampleSplit) -> Rehearsal:
        sites = dict.fromkeys(site for placement in self.placements for site in placement.ordered)
        subject = Subject(
            model=self.model,
            sites=tuple(sites),
            numbers=numbers,
            feeds=lambda: self.part(part),
            samples=self.samples,
            data="calibration",
            rounds_biases=self.rounds_biases,
        )
        known = self.known.setdefault((id(self.model), part), {})
        return Rehearsal(subject, self.runtime, known=known, adjustable=True)

    def errors(self, numbers: Quantizer, is_late: Callable[[], bool] = lambda: False) -> tuple[Errors, ...]:
        """The held-out error of each placement; from `LEAST_SAMPLES` on, no further sample runs once ``is_late``."""
        return self._errors(numbers, "held-out", self.placements, lambda _: is_late())

    def errors_of(self, placement: Placement, numbers: Quantizer) -> Errors:
        """The held-out error of a placement whose pairs are among those of `placements`."""
        return self._errors(numbers, "held-out", [placement], lambda _: False)[0]

    def compared(
        self,
        numbers: Quantizer,
        before: tuple[Errors, ...],
        changed: TensorKind | None,
        is_lost: Callable[[tuple[Errors, ...]], bool],
    ) -> tuple[Errors, ...]:
        """The error of each placement, on the samples of ``before``, or fewer if ``is_lost`` is true of the first ones.

        Placements without the numbers that ``changed`` are not run: they have the errors that they had.
        """
        affected = [
            changed is None or any(site.weight == (changed == "weights") for site in placement.sites)
            for placement in self.placements
        ]

        def whole(found: tuple[Errors, ...]) -> tuple[Errors, ...]:
            left, samples = iter(found), len(found[0].powers)
            return tuple(
                next(left) if own else old.first(samples) for own, old in zip(affected, before, strict=True)
            )

        placements = tuple(p for p, own in zip(self.placements, affected, strict=True) if own)
        if not placements:
            return before
        found = self._errors(
            numbers,
            "held-out",
            placements,
            lambda some: is_lost(whole(some)),
            least=SURE_SAMPLES,
            most=len(before[0].powers),
        )
        return whole(found)

    def _errors(
        self,
        numbers: Quantizer,
        part: SampleSplit,
        placements: Sequence[Placement],
        is_enough: Callable[[tuple[Errors, ...]], bool],
        least: int = LEAST_SAMPLES,
        most: int | None = None,
    ) -> tuple[Errors, ...]:
        rehearsal, adjusted = self.rehearsal(numbers, part)
        rows: list[list[Floats]] = [[] for _ in placements]
        settings = [rehearsal.switches.setting(placement) for placement in placements]
        found: tuple[Errors, ...] = ()
        samples, references = tee(islice(rehearsal.references(), most))
        each = rehearsal.values_each(
            ((setting, feed) for feed, _ in samples for setting in settings), adjusted
        )
        for _, reference in references:
            for row, values in zip(rows, each, strict=False):
                row.append(powers_at(rehearsal.guiding_edges, reference, values))
            found = tuple(Errors(np.array(row)) for row in rows)
            if len(rows[0]) >= least and is_enough(found):
                break
        return found

    def dominating(
        self, numbers: Quantizer, units: Sequence[str], place: Callable[[Collection[str]], Placement]
    ) -> tuple[str, ...]:
        """The few units without which all others together are usable; empty if there are none or too many.

        Each is found by halving: the half of the units with the lower SQNR is divided further. ``place`` gives the
        placement of some units, whose pairs are those of the first of `placements`.
        """
        left: list[str] = []
        most = min(MOST_LEFT, len(units) // LEFT_SHARE)

        def total_db(some: Collection[str]) -> float:
            (errors,) = self._errors(numbers, "fit", [place(some)], lambda _: True)
            return errors.total_db

        while total_db(rest := [unit for unit in units if unit not in left]) < USABLE_DB:
            if len(left) >= most:
                return ()
            while len(rest) > 1:
                middle = len(rest) // 2
                rest = min(rest[:middle], rest[middle:], key=total_db)
            left += rest
        return tuple(left)


@dataclass(frozen=True, slots=True)
class Errors:
    """Signal and noise power of one placement by sample and guiding tensor: (sample, tensor, 2)."""

    powers: Floats

    @property
    def total_db(self) -> float:
        """The SQNR over all samples at the worst tensor."""
        return float(_db(self.powers.sum(axis=0)).min(initial=MOST_DB))

    @property
    def by_sample_db(self) -> Floats:
        """The SQNR of each sample at its worst tensor."""
        return np.asarray(_db(self.powers).min(axis=-1, initial=MOST_DB), np.float64)

    def first(self, samples: int) -> Errors:
        """The errors on the first samples."""
        return Errors(self.powers[:samples])

    def without(self, sample: int) -> Errors:
        """The errors on all other samples."""
        return Errors(np.delete(self.powers, sample, axis=0))

    def gain_db(self, before: Errors) -> float:
        """The increase of the SQNR over the samples of this one, in dB."""
        return float(self.total_db - before.first(len(self.powers)).total_db)

    def gains_without_db(self, before: Errors) -> Floats:
        """The `gain_db` without each single sample of this one."""
        gains = [
            self.without(sample).gain_db(before.first(len(self.powers)).without(sample))
            for sample in range(len(self.powers))
        ]
        return np.array(gains, np.float64)

    def gains_db(self, before: Errors) -> Floats:
        """The increase of the SQNR of each sample of this one, in dB."""
        return self.by_sample_db - before.first(len(self.powers)).by_sample_db


def lower_bound_db(gains: Floats, errors: float = 1.0) -> float:
    """The mean of gains by sample, less so many standard errors."""
    deviation = float(gains.std(ddof=1)) if len(gains) > 1 else 0.0
    return float(gains.mean() - errors * deviation / max(len(gains), 1) ** 0.5)


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
