"""Finds the corrections that reduce the error, each added to the earlier ones, and keeps them in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqspec._core.codec import from_data
from qdqspec._core.plain_json import content_sum, read_json
from qdqspec.accuracy.corrections.bias import correct_biases
from qdqspec.accuracy.corrections.equalization import equalize
from qdqspec.accuracy.corrections.problem import USABLE_DB, CorrectionTask, IsOver, Problem, Ranges
from qdqspec.accuracy.corrections.ranges import choose_ranges
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.graph.save import write_text
from qdqspec.qdq.chains import EQUALIZATIONS, Equalization
from qdqspec.qdq.quantizer import Quantizer, WeightKey
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import CorrectionGain

# In the order in which they are tried: those after equalization are found for the equalized model, and the choice of
# ranges, which takes the longest, is the last.
CORRECTIONS: Mapping[str, Callable[[CorrectionTask, Problem, IsOver], Problem]] = {
    "equalization": equalize,
    "bias": correct_biases,
    "ranges": choose_ranges,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCorrections:
    """The accepted corrections, and the gain of each that was tried, also of rejected ones.

    ``failures`` are the reasons why others could not be tried, by name; ``untried`` were not begun within the time.
    ``model`` and ``numbers`` are those of the equalized model, ``None`` if no chain is ``equalized``.
    """

    ranges: Ranges = field(default_factory=dict)
    biases: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)
    gains: tuple[CorrectionGain, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    equalized: tuple[Equalization, ...] = ()
    model: Model | None = None
    numbers: Quantizer | None = None

    def applied(self, numbers: Quantizer) -> Quantizer:
        """The numbers of the model with these ranges and biases."""
        return numbers.corrected(replace(numbers.corrections, ranges=self.ranges, biases=self.biases))


def find_corrections(task: CorrectionTask) -> FoundCorrections:
    """Try each allowed correction in turn, until the first placement has enough SQNR or the time is up.

    If all placements are below 10 dB, only equalization is tried: such outputs tell nothing about placements that can
    be selected.
    A correction for which the runtime fails is not used. Raises `BackendError` if that is before the first one, and
    `RehearsalRefusedError` if the model cannot be rehearsed.
    """
    started, failures, untried = task.clock(), dict[str, str](), list[str]()

    def is_over(share: float = 1.0) -> bool:
        return task.clock() > started + share * task.seconds

    errors = task.judge.errors(task.numbers, lambda: is_over(1 / task.judgements))
    problem = Problem(judge=task.judge, numbers=task.numbers, errors=errors)
    for name, apply in CORRECTIONS.items():
        is_possible = name == "equalization" or any(each.worst_db >= USABLE_DB for each in problem.errors)
        if name not in task.allowed or not is_possible or problem.errors[0].worst_db >= task.enough_db:
            continue
        if is_over():
            untried.append(name)
            continue
        try:
            problem = apply(task, problem, is_over)
        except BackendError as error:
            failures[name] = error.what
    found = problem.numbers.corrections
    return FoundCorrections(
        ranges=found.ranges,
        biases=found.biases,
        gains=problem.gains,
        failures=failures,
        untried=tuple(untried),
        equalized=problem.equalized,
        model=problem.model if problem.equalized else None,
        numbers=problem.numbers if problem.equalized else None,
    )


def write_found(path: Path, run: Mapping[str, object], found: FoundCorrections) -> None:
    """Write corrections with their gains; ``run`` describes model, data and rules."""
    content: dict[str, Any] = {
        "gains": [asdict(gain) for gain in found.gains],
        "untried": list(found.untried),
        "equalized": [change.record for change in found.equalized],
        "ranges": {tensor: [span.low, span.high] for tensor, span in found.ranges.items()},
        "biases": [[*key, shift.tolist()] for key, shift in found.biases.items()],
    }
    write_text(path, json.dumps({"run": content_sum(run), "sum": content_sum(content), **content}))


def read_found(path: Path, run: Mapping[str, object]) -> FoundCorrections | None:
    """The corrections in a file, without numbers; ``None`` if it is missing, damaged, or of another run."""
    try:
        content = read_json(path, most_bytes=1 << 30)
        if content.pop("run") != content_sum(run) or content.pop("sum") != content_sum(content):
            return None
        return FoundCorrections(
            ranges={tensor: TensorRange(low, high) for tensor, (low, high) in content["ranges"].items()},
            biases={
                (tensor, name, axis): np.array(b, np.float32) for tensor, name, axis, b in content["biases"]
            },
            gains=tuple(from_data(CorrectionGain, gain) for gain in content["gains"]),
            untried=tuple(content["untried"]),
            equalized=EQUALIZATIONS.validate_python(content["equalized"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
