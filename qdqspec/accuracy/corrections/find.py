"""Finds the corrections that reduce the error, each added to the earlier ones, and keeps them in a file.

The error is rehearsed at the guiding tensors, on samples that were not used to find the correction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqspec._core.files import write_text
from qdqspec._core.records import content_sum, from_data, read_json
from qdqspec.accuracy.corrections.numbers import choose_ranges, correct_biases, equalize
from qdqspec.accuracy.corrections.problem import USABLE_DB, CorrectionTask, Problem, Ranges
from qdqspec.errors import BackendError
from qdqspec.graph import Model
from qdqspec.qdq import Equalization, Quantizer, TensorRange, WeightKey, equalized, scaled_tensors
from qdqspec.types import CorrectionGain

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


def find_corrections(
    task: CorrectionTask, judgements: float = 6, slow_share: float = 0.3
) -> FoundCorrections:
    """Try each allowed correction in turn, until the first placement has enough SQNR or the time is up.

    If all placements are below 10 dB, only equalization is tried: such outputs tell nothing about placements that can
    be selected. A judgement takes a part of the time, one of ``judgements``: where it would take longer, it is on fewer
    samples. If the first one takes ``slow_share`` of the time, nothing is tried, as that would take several times as
    long: a larger share finds more for slow models, and leaves less time to their searches. A correction for which the
    runtime fails is not used. Raises `BackendError` if that is before the first one, and `RehearsalRefusedError` if the
    model cannot be rehearsed.
    """
    failures = dict[str, str]()
    errors = task.errors(task.model, task.numbers, 1 / judgements)
    problem = Problem(task=task, model=task.model, numbers=task.numbers, errors=errors)
    possible = {} if task.is_over(slow_share) else CORRECTIONS
    for name, apply in possible.items():
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
