"""Finds the corrections that reduce the error, each added to the earlier ones, and keeps them in a file.

The error is rehearsed at the guiding tensors, on samples that were not used to find the correction.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import write_text
from qdqspec._core.records import content_sum, from_data, read_json
from qdqspec.accuracy.corrections.numbers import choose_ranges, correct_biases, equalize
from qdqspec.accuracy.evaluator import Powers
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime
from qdqspec.errors import BackendError
from qdqspec.graph import Model
from qdqspec.qdq import Equalization, Quantizer, TensorRange, WeightKey, equalized, scaled_tensors
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


# In the order in which they are tried: those after equalization are found for the equalized model, and the choice of
# ranges, which takes the longest, is the last.
CORRECTIONS: Mapping[str, Callable[[Problem], Problem]] = {
    "equalization": equalize,
    "bias": correct_biases,
    "ranges": choose_ranges,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCorrections:
    """The accepted corrections, and the gain of each that was tried, also of rejected ones.

    ``failures`` are the reasons why others could not be tried, by name. ``model`` and ``numbers`` are
    those of the equalized model, ``None`` if no chain is ``equalized``.
    """

    ranges: Ranges = field(default_factory=dict)
    biases: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)
    gains: tuple[CorrectionGain, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    equalized: tuple[Equalization, ...] = ()
    model: Model | None = None
    numbers: Quantizer | None = None


def find_corrections(task: CorrectionTask, judgements: float = 6) -> FoundCorrections:
    """Try each allowed correction in turn, until the first placement has enough SQNR or the time is up.

    If all placements are below 10 dB, only equalization is tried: such outputs tell nothing about placements that can
    be selected. A judgement takes a part of the time, one of ``judgements``: where it would take longer, it is on fewer
    samples. A correction for which the runtime fails is not used. Raises `BackendError` if that is before the first
    one, and `RehearsalRefusedError` if the model cannot be rehearsed.
    """
    failures = dict[str, str]()
    errors = task.errors(task.model, task.numbers, 1 / judgements)
    problem = Problem(task=task, model=task.model, numbers=task.numbers, errors=errors)
    for name, apply in CORRECTIONS.items():
        is_possible = name == "equalization" or any(each.worst_db >= USABLE_DB for each in problem.errors)
        is_enough = problem.errors[0].worst_db >= task.enough_db
        if name not in task.allowed or not is_possible or is_enough or task.is_over():
            continue
        try:
            problem = apply(problem)
        except BackendError as error:
            failures[name] = error.what
    found = problem.numbers.corrections
    return FoundCorrections(
        ranges=found.ranges,
        biases=found.biases,
        gains=problem.gains,
        failures=failures,
        equalized=problem.equalized,
        model=problem.model if problem.equalized else None,
        numbers=problem.numbers if problem.equalized else None,
    )


def write_found(path: Path, run: Mapping[str, object], found: FoundCorrections) -> None:
    """Write corrections with their gains; ``run`` describes model, data and rules."""
    content: dict[str, Any] = {
        "gains": [asdict(gain) for gain in found.gains],
        "equalized": [change.record for change in found.equalized],
        "ranges": {tensor: [span.low, span.high] for tensor, span in found.ranges.items()},
        "biases": [[*key, shift.tolist()] for key, shift in found.biases.items()],
    }
    write_text(path, json.dumps({"run": content_sum(run), "sum": content_sum(content), **content}))


def read_found(
    path: Path,
    run: Mapping[str, object],
    model: Model,
    recalibrated: Callable[[Model, Collection[str]], Quantizer],
) -> FoundCorrections | None:
    """The corrections in a file, of this ``model``; ``None`` if it is missing, damaged, or of another run.

    ``recalibrated`` gives the numbers of an equalized model, whose values in these tensors differ.
    """
    try:
        content = read_json(path, most_bytes=1 << 30)
        if content.pop("run") != content_sum(run) or content.pop("sum") != content_sum(content):
            return None
        found = FoundCorrections(
            ranges={tensor: TensorRange(low, high) for tensor, (low, high) in content["ranges"].items()},
            biases={
                (tensor, name, axis): np.array(b, np.float32) for tensor, name, axis, b in content["biases"]
            },
            gains=tuple(from_data(CorrectionGain, gain) for gain in content["gains"]),
            equalized=Equalization.read(content["equalized"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not found.equalized:
        return found
    other = equalized(model, found.equalized)
    numbers = recalibrated(other, scaled_tensors(model, found.equalized))
    return replace(found, model=other, numbers=numbers)
