"""Reads the corrections of a case from a file, or finds them on calibration data, in a share of the search's time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from qdqspec.corrections.find import CorrectionTask, FoundCorrections, find_corrections
from qdqspec.corrections.judge import MIN_SAMPLES, Judge
from qdqspec.corrections.kept import read_found, write_found
from qdqspec.corrections.ranges import Ranges
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.placement.edit.equalize import equalized, find_chains
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import reference_runtime
from qdqspec.quantize.calibrate import calibrate_with
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.rehearsal import RehearsalRefusedError
from qdqspec.types import Method, Placement

if TYPE_CHECKING:
    from qdqspec.preparation.prepare import Prepared

# Seconds by preset, if the search has no time limit, and else the share of it: more finds more in slow models.
SECONDS, SHARE = {"quick": 5.0, "default": 15.0, "extensive": 60.0}, 0.15
MARGIN_DB = 3.0  # above the SQNR limit, with which everything quantized needs no corrections
NEED_RANGES = ("equalization", "ranges")  # corrections that need ranges by calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSource:
    """Read a case's corrections from a ``file`` of the same ``run``, else find and write them.

    ``run`` describes model, data and rules. Without ``writes`` the file is only read.
    """

    file: Path | None = None
    run: Mapping[str, object] = field(default_factory=dict)
    writes: bool = True


class Correcting:
    """Reads or finds the corrections of a prepared case."""

    def __init__(self, prepared: Prepared, source: CorrectionSource) -> None:
        self._prepared, self._source = prepared, source
        self._case, self._space = prepared.case, prepared.space

    @property
    def samples(self) -> int:
        """The number of samples to find corrections on; zero if none can be found."""
        allowed, able = self._case.quantize.allowed_corrections, self._prepared.capabilities.computes
        data = self._prepared.calibration if allowed and able and self._space.units else None
        return 0 if data is None else len(data)

    def corrections(self) -> FoundCorrections:
        """The corrections, from the file if it has those of the same run."""
        file = self._source.file
        known = None if file is None else read_found(file, self._source.run, self._prepared.folded)
        if known is not None:
            return self._with_model(known)
        found = self.find()
        if found.gains or found.untried:  # a resumed search has the same
            self.keep(found)
        return found

    def keep(self, found: FoundCorrections) -> None:
        """Write corrections to the file, if there is one."""
        source = self._source
        if source.file is not None and source.writes:
            write_found(source.file, source.run, found)

    def _with_model(self, known: FoundCorrections) -> FoundCorrections:
        """Corrections from a file, with the equalized model and its numbers."""
        if not known.equalized:
            return known
        folded = self._prepared.folded
        names = {constant.tensor for change in known.equalized for constant in change.constants}
        own = [c for c in find_chains(folded) if names.issuperset(one.tensor for one in c.constants)]
        model = equalized(folded, known.equalized)
        numbers = self._prepared.recalibrated(model, {tensor for chain in own for tensor in chain.tensors})
        return replace(known, model=model, numbers=numbers)

    def find(self) -> FoundCorrections:
        """The corrections that help; none without calibration data or if the model cannot be rehearsed."""
        prepared, samples = self._prepared, self.samples
        data = prepared.calibration
        if data is None or not samples:
            return FoundCorrections()
        if samples < MIN_SAMPLES:
            if self._case.quantize.corrections != "auto":
                prepared.note_once(
                    f"corrections need {MIN_SAMPLES} calibration samples, and there are {samples}: none is applied"
                )
            return FoundCorrections()
        if not self._is_of_use:
            return FoundCorrections()
        with ExitStack() as opened:
            judge = Judge(
                model=prepared.folded,
                placements=judged_placements(self._space),
                feeds=lambda: data,
                runtime=reference_runtime(opened, prepared.options, prepared.backend),
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            opened.callback(judge.close)
            try:
                found = find_corrections(self._task(prepared.folded, prepared.calibrated[1], judge))
                for name, reason in found.failures.items():
                    prepared.note_once(f"the correction '{name}' could not be tried: {reason}")
                return found
            except (BackendError, RehearsalRefusedError) as error:
                prepared.note_once(f"no corrections are applied: {error.what}")
                return FoundCorrections()

    @property
    def _is_of_use(self) -> bool:
        """Whether accuracy limits the search or is its objective, or corrections are asked for by name."""
        rules, corrections = self._case.tune, self._case.quantize.corrections
        is_limited = rules.limits.min_sqnr_db is not None or rules.accuracy is not None
        return is_limited or rules.objective == "pareto" or corrections != "auto"

    @property
    def _enough_db(self) -> float:
        """The SQNR of everything quantized with which no correction is needed."""
        rules = self._case.tune
        least = rules.limits.min_sqnr_db
        is_alone = rules.accuracy is None and rules.objective != "pareto"
        seeks_all = self._case.quantize.corrections != "auto"
        return math.inf if least is None or not is_alone or seeks_all else least + MARGIN_DB

    def _task(self, model: Model, numbers: Quantizer, judge: Judge) -> CorrectionTask:
        """The task for this model, which is the case's or an equalized one."""
        prepared, rules = self._prepared, self._case.quantize
        given = () if self._case.inputs.scales is None else NEED_RANGES
        return CorrectionTask(
            model=model,
            judge=judge,
            numbers=numbers,
            sites=tuple(dict.fromkeys(site for each in judge.placements for site in each.ordered)),
            ranges=partial(self._ranges, model),
            method=rules.calibration,
            observe=partial(prepared.values_of, model),
            allowed=tuple(name for name in rules.allowed_corrections if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=prepared.fixed_tensors,
            equalized=lambda other, tensors: self._task(other, prepared.recalibrated(other, tensors), judge),
            enough_db=self._enough_db,
            seconds=self._seconds,
        )

    def _ranges(self, model: Model, even: bool) -> Mapping[str, Ranges]:
        """The ranges of all activations by every method, on all samples or on the ``even`` ones."""
        prepared, methods = self._prepared, get_args(Method)
        with ExitStack() as observers:
            run = partial(prepared.runner, observers)
            tensors, dropped = (
                self._space.tensors,
                lambda _: None,
            )  # the first calibration gave the same notes
            feeds = lambda: islice(prepared.feeds(), 0, None, 2 if even else 1)  # noqa: E731
            found = calibrate_with(model, tensors, feeds, methods, run, note=dropped)
            return {str(method): ranges for method, ranges in found.items()}

    @property
    def _seconds(self) -> float:
        most, minutes = SECONDS[self._case.tune.preset], self._case.tune.minutes
        return most if minutes is None else min(most, SHARE * 60 * minutes)


def judged_placements(space: SchemeSpace) -> tuple[Placement, ...]:
    """The placements that corrections are judged on: everything, and only linear operators with float outputs."""
    linear = {
        unit.id: "in-only"
        for unit in space.units
        if unit.op_type in ("Gemm", "MatMul") and "in-only" in unit.labels
    }
    found = (space.resolve(space.everything()), space.resolve(linear))
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())
