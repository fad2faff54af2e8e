"""The data types of corrections: the task, the problem that each correction improves, and the judge of its error.

The error is rehearsed at the guiding tensors, on samples that were not used to find the correction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from typing import Literal, TypeAlias

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.evaluator import Powers
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime, Subject
from qdqspec.accuracy.rehearsal.graph import Values
from qdqspec.graph.model import Model
from qdqspec.qdq.chains import Equalization
from qdqspec.qdq.quantizer import Corrections, Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import CorrectionGain, Placement, Site

Ranges: TypeAlias = Mapping[str, TensorRange]
IsOver: TypeAlias = Callable[[], bool]  # whether the time for corrections is up

MIN_SAMPLES = 4  # of both parts together; fewer cannot be split
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
    rounds_biases: frozenset[str] = frozenset()  # as in `qdqspec.qdq.capabilities.Capabilities`
    _known: dict[int, Values] = field(default_factory=dict, init=False)  # outputs of the float model

    def part(self, part: Literal["fit", "held-out"], samples: int | None = None) -> Iterator[Feed]:
        """The first ``samples`` of a part, by default those that placements are judged on."""
        return islice(self.feeds(), int(part == "held-out"), 2 * (samples or self.samples), 2)

    def errors(
        self, numbers: Quantizer, is_late: IsOver = lambda: False, least_samples: int = 2
    ) -> tuple[Powers, ...]:
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
        found = tuple(Powers() for _ in self.placements)
        with Rehearsal(subject, self.runtime, known=self._known) as rehearsal:

            def until_late() -> Iterator[tuple[Feed, Values]]:
                for count, sample in enumerate(rehearsal.references()):
                    if count >= least_samples and is_late():
                        self.samples = count
                        return
                    yield sample

            settings = [rehearsal.switches.setting(placement) for placement in self.placements]
            samples, references = tee(until_late())
            each = rehearsal.values_each((setting, feed) for feed, _ in samples for setting in settings)
            for _, reference in references:
                expected = {edge: reference[edge] for edge in rehearsal.guiding_edges}
                for powers, values in zip(found, each, strict=False):
                    powers.add(expected, values)
        return found


def is_gain(
    after: Iterable[Powers], before: Iterable[Powers], least_db: float = 0.1, most_loss_db: float = 0.05
) -> bool:
    """Whether placements with usable outputs gain ``least_db`` in the mean, and none loses more than ``most_loss_db``.

    Their mean is no loss without any single sample either, whose gain may be chance. Smaller numbers accept more
    corrections whose gain is not that of other data.
    """
    pairs = [
        (new, old)
        for new, old in zip(after, before, strict=True)
        if max(new.worst_db, old.worst_db) >= USABLE_DB and new.worst_db != old.worst_db
    ]
    gains = [new.worst_db - old.worst_db for new, old in pairs]
    if not gains or sum(gains) / len(gains) < least_db or min(gains) < -most_loss_db:
        return False
    without = [
        [new.without(n).worst_db - old.without(n).worst_db for n in range(new.samples)] for new, old in pairs
    ]
    return float(np.mean(without, axis=0).min()) >= -most_loss_db


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTask:
    """The inputs of the search for corrections: the ``allowed`` ones, for these numbers, within ``seconds``.

    The placements of the ``judge`` quantize the ``sites``. None are sought if the first of them has ``enough_db``.
    ``ranges`` gives those of a model by two calibration methods, one the case's own ``method``, on all samples or the
    even ones. ``observe`` gives the values of tensors of a model, and ``recalibrated`` the numbers of a model with
    other values in these tensors. ``saturates`` is whether sums of two neighbouring u8 x s8 products saturate on the
    processor. Numbers of tensors in ``fixed`` are not changed. A judgement takes a part of the time, one of
    ``judgements``: where it would take longer, it is on fewer samples.
    """

    judge: Judge
    numbers: Quantizer
    sites: tuple[Site, ...]
    ranges: Callable[[Model, bool], Mapping[str, Ranges]]
    method: str
    observe: Callable[[Model, Sequence[str], Iterable[Feed]], Iterator[Mapping[str, Array]]]
    recalibrated: Callable[[Model, Collection[str]], Quantizer]
    allowed: tuple[str, ...]
    saturates: bool
    fixed: frozenset[str] = frozenset()
    enough_db: float
    seconds: float
    judgements: float = 6
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The model of a judge, ``equalized`` or not, its numbers, the errors with them, and the gains that led here."""

    judge: Judge
    numbers: Quantizer
    errors: tuple[Powers, ...]
    equalized: tuple[Equalization, ...] = ()
    gains: tuple[CorrectionGain, ...] = ()

    @property
    def model(self) -> Model:
        """The model whose placements are judged."""
        return self.judge.model

    def with_numbers(self, corrections: Corrections) -> Problem:
        """The same problem with other corrected numbers, judged."""
        numbers = self.numbers.corrected(corrections)
        return replace(self, numbers=numbers, errors=self.judge.errors(numbers))

    def choose(self, name: str, other: Problem, changed: int) -> Problem:
        """The other problem if a correction gains in it, else this one; both with the gain."""
        gain = CorrectionGain(
            name=name,
            before_db=self.errors[0].worst_db,
            after_db=other.errors[0].worst_db,
            changed=changed,
            taken=is_gain(other.errors, self.errors),
        )
        return replace(other if gain.taken else self, gains=(*self.gains, gain))
