"""The problem that corrections improve: a model with its numbers, judged by the rehearsed error of placements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.evaluator import Powers
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime
from qdqspec.graph import Model
from qdqspec.qdq import Equalization, Quantizer, TensorRange
from qdqspec.types import CorrectionGain, Method, Placement, Site

Ranges: TypeAlias = Mapping[str, TensorRange]

MIN_SAMPLES = 4  # of both parts together; fewer cannot be split
USABLE_DB = 10.0  # below it, a few pairs dominate the outputs, and gains or losses are not meaningful


def is_gain(
    after: Iterable[Powers],
    before: Iterable[Powers],
    least_db: float = 0.1,
    most_loss_db: float = 0.05,
    usable_db: float = USABLE_DB,
) -> bool:
    """Whether placements with usable outputs gain ``least_db`` in the mean, and none loses more than ``most_loss_db``.

    Their mean is no loss without any single sample either, whose gain may be chance. Smaller numbers accept more
    corrections whose gain is not that of other data. Outputs are usable from ``usable_db`` on.
    """
    pairs = [
        (new, old)
        for new, old in zip(after, before, strict=True)
        if max(new.worst_db, old.worst_db) >= usable_db and new.worst_db != old.worst_db
    ]
    gains = [new.worst_db - old.worst_db for new, old in pairs]
    if not gains or sum(gains) / len(gains) < least_db or min(gains) < -most_loss_db:
        return False
    without = [
        [new.without(n).worst_db - old.without(n).worst_db for n in range(new.samples)] for new, old in pairs
    ]
    return float(np.mean(without, axis=0).min()) >= -most_loss_db


@dataclass(slots=True, kw_only=True)
class CorrectionTask:
    """The inputs of the search for corrections: the ``allowed`` ones, for ``model`` with ``numbers``, in ``seconds``.

    They are judged by rehearsals of ``placements`` on ``feeds``; none are sought if the first has ``enough_db``. Even
    samples are for finding corrections, odd ones for judging them: more ``samples`` of each part find rarer losses, and
    take the time of a run for each placement. ``rounds_biases``: see `qdqspec.qdq.capabilities.Capabilities`.

    ``ranges`` gives those of a model by the case's own ``method`` and another one, on every so many samples.
    ``observe`` gives the values of tensors of a model, and ``recalibrated`` the numbers of a model with other values in
    these tensors. ``saturates`` is whether sums of two neighbouring u8 x s8 products saturate on the processor. Numbers
    of tensors in ``fixed`` are not changed.
    """

    model: Model
    numbers: Quantizer
    placements: tuple[Placement, ...]
    feeds: Callable[[], Iterable[Feed]]
    runtime: Runtime
    ranges: Callable[[Model, Method, int], Mapping[Method, Ranges]]
    method: Method
    observe: Callable[[Model, Sequence[str], Iterable[Feed]], Iterator[Mapping[str, Array]]]
    recalibrated: Callable[[Model, Collection[str]], Quantizer]
    allowed: tuple[str, ...]
    saturates: bool
    fixed: frozenset[str] = frozenset()
    enough_db: float
    seconds: float
    samples: int = 12
    rounds_biases: frozenset[str] = frozenset()
    _started: float = field(default_factory=time.monotonic, init=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all placements."""
        return tuple(dict.fromkeys(site for placement in self.placements for site in placement.ordered))

    def is_over(self, share: float = 1.0) -> bool:
        """Whether a share of the time has passed."""
        return time.monotonic() > self._started + share * self.seconds

    def part(self, part: Literal["fit", "held-out"], samples: int | None = None) -> Iterator[Feed]:
        """The first ``samples`` of a part, by default those that placements are judged on."""
        return islice(self.feeds(), int(part == "held-out"), 2 * (samples or self.samples), 2)

    def errors(
        self,
        model: Model,
        numbers: Quantizer,
        share: float = math.inf,
        least_samples: int = 2,
    ) -> tuple[Powers, ...]:
        """The held-out error of each placement of a model with these numbers.

        Once a ``share`` of the time has passed, the samples so far, and not fewer than ``least_samples``, are those of
        all judgements.
        """
        found = tuple(Powers() for _ in self.placements)
        with Rehearsal(
            model,
            self.sites,
            numbers,
            lambda: self.part("held-out"),
            self.runtime,
            samples=self.samples,
            rounds_biases=self.rounds_biases,
        ) as rehearsal:
            for count, (reference, each) in enumerate(rehearsal.compared(self.placements), 1):
                expected = {edge: reference[edge] for edge in rehearsal.guiding_edges if edge in reference}
                for powers, values in zip(found, each, strict=True):
                    powers.add(expected, values)
                if count >= least_samples and self.is_over(share):
                    self.samples = count
                    break
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model, ``equalized`` or not, its numbers, the errors of the task's placements, and the gains that led here."""

    task: CorrectionTask
    model: Model
    numbers: Quantizer
    errors: tuple[Powers, ...]
    equalized: tuple[Equalization, ...] = ()
    gains: tuple[CorrectionGain, ...] = ()

    def with_numbers(self, **corrections: Mapping[Any, Any]) -> Problem:
        """The same problem with other corrected numbers, judged: see `Quantizer.corrected`."""
        numbers = self.numbers.corrected(**corrections)
        return replace(self, numbers=numbers, errors=self.task.errors(self.model, numbers))

    def gains_over(self, other: Problem) -> bool:
        """Whether its placements have less error than those of the other problem: see `is_gain`."""
        return is_gain(self.errors, other.errors)

    def choose(self, name: str, other: Problem, changed: int) -> Problem:
        """The other problem if a correction gains in it, else this one; both with the gain."""
        gain = CorrectionGain(
            name=name,
            before_db=self.errors[0].worst_db,
            after_db=other.errors[0].worst_db,
            changed=changed,
            taken=other.gains_over(self),
        )
        return replace(other if gain.taken else self, gains=(*self.gains, gain))
