"""Reads the corrections of a case from a file, or finds them on calibration data, in a share of the search's time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from qdqspec.arrays import Feed
from qdqspec.corrections.find import FoundCorrections, Question, find_corrections
from qdqspec.corrections.judge import MIN_SAMPLES, Judge
from qdqspec.corrections.kept import read_found, write_found
from qdqspec.corrections.ranges import Ranges
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.placement.edit.equalize import equalized, find_chains
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import reference_runtime
from qdqspec.quantize.calibrate import calibrate_with, passes
from qdqspec.quantize.formats import BIAS_FORMAT
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.rehearsal import RehearsalRefusedError
from qdqspec.types import Method, Placement

if TYPE_CHECKING:
    from qdqspec.preparation.prepare import Prepared

SECONDS = {"quick": 5.0, "default": 30.0, "extensive": 120.0}  # by preset, if the search has no time limit
SHARE = 0.15  # of the time limit
NEED_RANGES = ("equalization", "margins", "ranges")  # corrections that need ranges by calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSource:
    """Read a case's corrections from a ``file`` of the same ``run``, else find and write them.

    ``run`` describes model, data and rules. Without ``writes`` the file is only read; without ``finds`` there are no
    corrections but those in it. They are judged at ``first`` too, a placement that meets the limits without them, and
    without the units in ``excluded``, which no placement within the limits quantizes.
    """

    file: Path | None = None
    run: Mapping[str, object] = field(default_factory=dict)
    writes: bool = True
    finds: bool = True
    first: Placement | None = None
    excluded: frozenset[str] = frozenset()


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
        found = self.find() if self._source.finds else FoundCorrections()
        if found.gains:
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
        with ExitStack() as opened:
            judge = Judge(
                model=prepared.folded,
                placements=self._judged(),
                feeds=lambda: data,
                runtime=reference_runtime(opened, prepared.options, prepared.backend),
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            opened.callback(judge.rehearsals.close)
            try:
                found = find_corrections(self._question(prepared.folded, prepared.calibrated[1], judge))
                for name, reason in found.failures.items():
                    prepared.note_once(f"the correction '{name}' could not be tried: {reason}")
                return found
            except (BackendError, RehearsalRefusedError) as error:
                prepared.note_once(f"no corrections are applied: {error.what}")
                return FoundCorrections()

    def _question(self, model: Model, numbers: Quantizer, judge: Judge) -> Question:
        """The question about this model, which is the case's or an equalized one."""
        prepared, rules, everything = self._prepared, self._case.quantize, self._space.everything()
        labels = {unit: label for unit, label in everything.items() if unit not in self._source.excluded}
        placements = (self._space.resolve(everything), *judge.placements)
        given = () if self._case.inputs.scales is None else NEED_RANGES
        readings = passes(get_args(Method)) / passes([rules.calibration])
        return Question(
            model=model,
            judge=replace(judge, model=model),
            numbers=numbers,
            sites=tuple(dict.fromkeys(s for p in placements for s in p.ordered)),
            units=tuple(labels),
            place=lambda units: self._space.resolve({unit: labels[unit] for unit in units}),
            without=self._judged,
            first=self._source.first,
            ranges=partial(self._ranges, model),
            fit_ranges=partial(prepared.tensor_ranges, model, self._space.tensors, self._every_second),
            method=rules.calibration,
            observe=partial(prepared.values_of, model),
            allowed=tuple(name for name in rules.allowed_corrections if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=prepared.fixed_tensors,
            equalized=lambda other, tensors: self._question(
                other, prepared.recalibrated(other, tensors), judge
            ),
            seconds=self._seconds,
            ranges_seconds=readings * prepared.calibration_seconds,
        )

    def _ranges(self, model: Model) -> Mapping[str, Ranges]:
        """The ranges of all activations by every method."""
        prepared, methods = self._prepared, get_args(Method)
        with ExitStack() as observers:
            run = partial(prepared.runner, observers)
            # the first calibration gave the same notes
            tensors, dropped = self._space.tensors, lambda _: None
            found = calibrate_with(model, tensors, prepared.feeds, methods, run, note=dropped)
            return {str(method): ranges for method, ranges in found.items()}

    def _every_second(self) -> Iterator[Feed]:
        return islice(self._prepared.feeds(), 0, None, 2)

    def _judged(self, without: Collection[str] = ()) -> tuple[Placement, ...]:
        """The placements that corrections are judged on; the ``first`` one is the last, whatever is left out."""
        usual = _with_halves(judged_placements(self._space, {*without, *self._source.excluded}))
        first = self._source.first
        return usual if first is None else tuple(dict.fromkeys((*usual, first)))

    @property
    def _seconds(self) -> float:
        most, minutes = SECONDS[self._case.tune.preset], self._case.tune.minutes
        return most if minutes is None else min(most, SHARE * 60 * minutes)


def judged_placements(space: SchemeSpace, without: Collection[str] = ()) -> tuple[Placement, ...]:
    """The placements that corrections are judged on: everything, and only linear operators with float outputs.

    The units in ``without`` stay in floating point.
    """
    linear = {
        unit.id: "in-only"
        for unit in space.units
        if unit.op_type in ("Gemm", "MatMul") and "in-only" in unit.labels and unit.id not in without
    }
    everything = {unit: label for unit, label in space.everything().items() if unit not in without}
    found = (space.resolve(everything), space.resolve(linear))
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())


def _with_halves(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements, and the weights and the activations of the first one separately.

    Each half shows the effect of a correction where the other half dominates the total error.
    """
    everything = placements[0]
    sites = [site for site in everything.sites if site.format != BIAS_FORMAT]
    halves = (
        Placement(sites=frozenset(site for site in sites if site.weight == weight))
        for weight in (True, False)
    )
    found = (*placements, *halves)
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())
