"""The corrections of a case: products with factors of channels, and what helps on calibration data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from qdqspec._core.arrays import Feed
from qdqspec.accuracy.corrections.equalization import WeightSteps, chosen_equalizations
from qdqspec.accuracy.corrections.find import FoundCorrections, find_corrections, read_found
from qdqspec.accuracy.corrections.problem import MIN_SAMPLES, CorrectionTask, Judge, Ranges
from qdqspec.accuracy.corrections.ranges import NARROW
from qdqspec.accuracy.rehearsal import RehearsalRefusedError
from qdqspec.app.preparation.auxiliary_runs import reference_runtime
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.equalize import Equalization, branched, equalized, find_chains
from qdqspec.qdq.quantize.calibrate import calibrate_with
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

NEED_RANGES = ("equalization", "ranges")  # corrections that need ranges by calibration


def scaled_branches(
    prepared: Prepared, model: Model, samples: int = 16, least_gain: float = 0.5
) -> tuple[Equalization, ...]:
    """The branches whose factors reduce the estimated error of the linear operators behind by ``least_gain``.

    A product takes time, so that less is not worth it. The estimate uses ``samples``: more of them show rarer values,
    and take the time of a run each. There are none beside scales that the user or a quantized model of ``start_from``
    gives, which are those of the model as it is.
    """
    case, data = prepared.case, prepared.calibration
    if "equalization" not in case.quantize.allowed_corrections or data is None or len(data) < MIN_SAMPLES:
        return ()
    if case.inputs.scales is not None or prepared.start_scales.tensors or not prepared.capabilities.computes:
        return ()
    possible = {change.branch.product: change for change in branched(model) if change.branch is not None}
    readers = {name for change in possible.values() if change.branch for name in change.branch.readers}
    if not possible:
        return ()
    behind = SchemeSpace(model, prepared.capabilities, allowed=readers, rules=case.quantize)
    if not behind.units:
        return ()
    extended = equalized(model, tuple(possible.values()))
    chains = [chain for chain in find_chains(extended) if chain.maker.name in possible]
    weights = frozenset(absorber.weight.tensor for chain in chains for absorber in chain.absorbers)
    try:
        chosen = chosen_equalizations(
            extended,
            chains,
            WeightSteps(steps=63 if prepared.capabilities.reduce_range else 127, per_channel=weights),
            lambda sources: prepared.values_of(extended, sources, islice(data, samples)),
            least_gain,
        )
    except BackendError:
        return ()  # calibration has the same failure, and reports it
    return tuple(replace(possible[chain.maker.name], exponents=change.exponents) for chain, change in chosen)


class Correcting:
    """Finds the corrections of a prepared case, or reads them with the equalized model and its numbers.

    They may take ``share`` of the search's time, and at most ``seconds``, by preset: more finds more in slow models.
    None are sought if everything quantized is ``margin_db`` above the SQNR limit: a larger margin seeks them more
    often, and lets selected models be quantized further.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        share: float = 0.15,
        seconds: Mapping[str, float] = MappingProxyType({"quick": 5.0, "default": 15.0, "extensive": 60.0}),
        margin_db: float = 3.0,
    ) -> None:
        self._prepared, self._case, self._space = prepared, prepared.case, prepared.space
        minutes, most = self._case.tune.minutes, seconds[self._case.tune.preset]
        self._seconds = most if minutes is None else min(most, share * 60 * minutes)
        self._margin_db = margin_db

    def read(self, file: Path, run: Mapping[str, object]) -> FoundCorrections | None:
        """The corrections in a file; ``None`` if it has none of the same run."""
        known = read_found(file, run)
        if known is None or not known.equalized:
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
        numbers = prepared.calibrated[1]
        weights = numbers.corrections.weights  # those of a quantized model that the search starts from
        return CorrectionTask(
            judge=judge,
            numbers=numbers,
            sites=tuple(dict.fromkeys(site for each in judge.placements for site in each.ordered)),
            ranges=self._ranges,
            method=rules.calibration,
            observe=prepared.values_of,
            allowed=tuple(name for name in rules.allowed_corrections if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=frozenset((*prepared.start_scales.ranges, *(tensor for tensor, _, _ in weights))),
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
