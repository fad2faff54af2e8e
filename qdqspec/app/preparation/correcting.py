"""Reads the corrections of a case from a file, or finds them on calibration data, in a share of the search's time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from qdqspec._core.arrays import Feed
from qdqspec.accuracy.corrections.find import FoundCorrections, find_corrections, read_found, write_found
from qdqspec.accuracy.corrections.problem import MIN_SAMPLES, CorrectionTask, Judge, Ranges
from qdqspec.accuracy.corrections.ranges import NARROW
from qdqspec.accuracy.rehearsal import RehearsalRefusedError
from qdqspec.app.preparation.auxiliary_runs import reference_runtime
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.equalize import equalized, find_chains
from qdqspec.qdq.quantize.calibrate import calibrate_with
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

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
    """Reads or finds the corrections of a prepared case.

    They may take ``share`` of the search's time, and at most ``seconds``, by preset: more finds more in slow models.
    None are sought if everything quantized is ``margin_db`` above the SQNR limit: a larger margin seeks them more
    often, and lets selected models be quantized further.
    """

    def __init__(
        self,
        prepared: Prepared,
        source: CorrectionSource,
        *,
        share: float = 0.15,
        seconds: Mapping[str, float] = MappingProxyType({"quick": 5.0, "default": 15.0, "extensive": 60.0}),
        margin_db: float = 3.0,
    ) -> None:
        self._prepared, self._source = prepared, source
        self._case, self._space = prepared.case, prepared.space
        minutes, most = self._case.tune.minutes, seconds[self._case.tune.preset]
        self._seconds = most if minutes is None else min(most, share * 60 * minutes)
        self._margin_db = margin_db

    def corrections(self) -> FoundCorrections:
        """The corrections, from the file if it has those of the same run."""
        source = self._source
        known = None if source.file is None else read_found(source.file, source.run)
        if known is not None:
            return self._with_model(known)
        found = self.find()
        # a resumed search has the same
        if source.file is not None and source.writes and (found.gains or found.untried):
            write_found(source.file, source.run, found)
        return found

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
        prepared, rules = self._prepared, self._case.quantize
        able = rules.allowed_corrections and prepared.capabilities.computes and self._space.units
        if not able or prepared.calibration is None:
            return FoundCorrections()
        samples = len(prepared.calibration)
        if samples < MIN_SAMPLES:
            if rules.corrections != "auto":
                prepared.note_once(
                    f"corrections need {MIN_SAMPLES} calibration samples, and there are {samples}: none is applied"
                )
            return FoundCorrections()
        if self._enough_db == -math.inf:
            return FoundCorrections()
        with ExitStack() as opened:
            judge = Judge(
                model=prepared.folded,
                placements=judged_placements(self._space),
                feeds=prepared.feeds,
                runtime=reference_runtime(opened, prepared.options, prepared.backend),
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            try:
                found = find_corrections(self._task(judge))
                for name, reason in found.failures.items():
                    prepared.note_once(f"the correction '{name}' could not be tried: {reason}")
                return found
            except (BackendError, RehearsalRefusedError) as error:
                prepared.note_once(f"no corrections are applied: {error.what}")
                return FoundCorrections()

    @property
    def _enough_db(self) -> float:
        """The SQNR of everything quantized with which no correction is needed.

        Any, unless accuracy limits the search or is its objective, or corrections are asked for by name.
        """
        rules, least_db = self._case.tune, self._case.tune.limits.min_sqnr_db
        needs_all = rules.accuracy is not None or rules.objective == "pareto"
        if needs_all or self._case.quantize.corrections != "auto":
            return math.inf
        return -math.inf if least_db is None else least_db + self._margin_db

    def _task(self, judge: Judge) -> CorrectionTask:
        prepared, rules = self._prepared, self._case.quantize
        given = () if self._case.inputs.scales is None else NEED_RANGES
        return CorrectionTask(
            judge=judge,
            numbers=prepared.calibrated[1],
            sites=tuple(dict.fromkeys(site for each in judge.placements for site in each.ordered)),
            ranges=self._ranges,
            method=rules.calibration,
            observe=prepared.values_of,
            allowed=tuple(name for name in rules.allowed_corrections if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=prepared.fixed_tensors,
            recalibrated=prepared.recalibrated,
            enough_db=self._enough_db,
            seconds=self._seconds,
        )

    def _ranges(self, model: Model, even: bool) -> Mapping[str, Ranges]:
        """Ranges of all activations by the case's method and `NARROW`, of all samples or of the ``even`` ones."""
        prepared = self._prepared

        def feeds() -> Iterator[Feed]:
            return islice(prepared.feeds(), 0, None, 2 if even else 1)

        with ExitStack() as observers:
            run, tensors = partial(prepared.runner, observers), self._space.tensors
            methods = {self._case.quantize.calibration, NARROW}
            found = calibrate_with(model, tensors, feeds, methods, run, note=lambda _: None)  # noted before
            return {str(method): ranges for method, ranges in found.items()}


def judged_placements(space: SchemeSpace) -> tuple[Placement, ...]:
    """The placements that corrections are judged on: everything, and only linear operators with float outputs."""
    linear = {
        unit.id: "in-only"
        for unit in space.units
        if unit.op_type in ("Gemm", "MatMul") and "in-only" in unit.labels
    }
    found = (space.resolve(space.everything()), space.resolve(linear))
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())
