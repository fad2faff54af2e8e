"""What corrections are found for, and what each returns: a problem with better numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.corrections.judge import USABLE_DB, Errors, Judge, is_gain
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.equalize import Equalization
from qdqspec.qdq.quantize.corrections import Corrections
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import CorrectionGain, Site

Ranges: TypeAlias = Mapping[str, TensorRange]
IsOver: TypeAlias = Callable[[], bool]  # whether the time for corrections is up


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTask:
    """The inputs of the search for corrections: the ``allowed`` ones, for these numbers, within ``seconds``.

    The placements of the ``judge`` quantize the ``sites``. None are sought if the first of them has ``enough_db``.
    ``ranges`` gives those of a model by two calibration methods on some of the samples: all, or the even ones.
    ``method`` is the case's own. ``observe`` gives the values of tensors of a model, and ``recalibrated`` the numbers
    of a model with other values in these tensors. ``saturates`` is whether sums of two neighbouring u8 x s8 products
    saturate on the processor. Numbers of tensors in ``fixed`` are not changed. A judgement takes a part of the time,
    one of ``judgements``: where it would take longer, it is on fewer samples.
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
    errors: tuple[Errors, ...]
    equalized: tuple[Equalization, ...] = ()
    gains: tuple[CorrectionGain, ...] = ()

    @property
    def model(self) -> Model:
        """The model whose placements are judged."""
        return self.judge.model

    @property
    def is_usable(self) -> bool:
        """Whether a placement has outputs that are not meaningless."""
        return any(errors.total_db >= USABLE_DB for errors in self.errors)

    def with_numbers(self, corrections: Corrections) -> Problem:
        """The same problem with other corrected numbers, judged."""
        numbers = self.numbers.corrected(corrections)
        return replace(self, numbers=numbers, errors=self.judge.errors(numbers))

    def choose(self, name: str, other: Problem, changed: int) -> Problem:
        """The other problem if a correction gains in it, else this one; both with the gain."""
        gain = CorrectionGain(
            name=name,
            before_db=self.errors[0].total_db,
            after_db=other.errors[0].total_db,
            changed=changed,
            taken=is_gain(other.errors, self.errors),
        )
        return replace(other if gain.taken else self, gains=(*self.gains, gain))
