"""Finds the corrections of a case on its calibration data, within a share of the search's time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from qdqspec.arrays import Array, Feed
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.corrections.find import FoundCorrections, Question, find_corrections
from qdqspec.corrections.judge import MIN_SAMPLES, Judge
from qdqspec.corrections.ranges import Ranges
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.graph.observe import observe
from qdqspec.graph.wire import Parts
from qdqspec.parity.data import Dataset
from qdqspec.placement.space import SchemeSpace
from qdqspec.preparation.runtimes import reference_runtime
from qdqspec.quantize.formats import BIAS_FORMAT
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.rehearsal import RehearsalRefusedError
from qdqspec.types import Case, Placement

SECONDS = {"quick": 5.0, "default": 30.0, "extensive": 120.0}  # by preset, if the search has no time limit
SHARE = 0.15  # of the time limit
NEED_RANGES = ("equalization", "margins", "ranges")  # corrections that need ranges by calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Correcting:
    """A case with the inputs of correction. ``run`` makes a model runner.

    ``ranges`` calibrates by every method, ``fit_ranges`` by the case's own on the even samples alone; ``recalibrated``
    are the numbers of an equalized model, in which the ranges of some tensors have changed.
    """

    case: Case
    model: Model
    space: SchemeSpace
    numbers: Quantizer
    data: Dataset | None
    backend: Backend
    options: BuildOptions
    ranges: Callable[[Model], Mapping[str, Ranges]]
    fit_ranges: Callable[[Model], Ranges]
    recalibrated: Callable[[Model, Collection[str]], Quantizer]
    run: Callable[[ExitStack, Parts], Callable[[Feed], Mapping[str, Array]]]
    note: Callable[[str], None]
    fixed: frozenset[str] = frozenset()
    first: Placement | None = None

    @property
    def samples(self) -> int:
        """The number of samples to find corrections on; zero if none can be found."""
        able = self.backend.capabilities(self.options).computes
        if not self.case.quantize.allowed_corrections or not able or not self.space.units:
            return 0
        return 0 if self.data is None else len(self.data)

    def find(self) -> FoundCorrections:
        """The corrections that help; none without calibration data or if the model cannot be rehearsed."""
        data, samples = self.data, self.samples
        if data is None or not samples:
            return FoundCorrections()
        if samples < MIN_SAMPLES:
            if self.case.quantize.corrections != "auto":
                self.note(
                    f"corrections need {MIN_SAMPLES} calibration samples, and there are {samples}: none is applied"
                )
            return FoundCorrections()
        with ExitStack() as opened:
            judge = Judge(
                model=self.model,
                placements=self._judged(),
                feeds=lambda: data,
                runtime=reference_runtime(opened, self.options, self.backend),
            )
            opened.callback(judge.rehearsals.close)
            try:
                return find_corrections(self._question(self.model, self.numbers, judge))
            except (BackendError, RehearsalRefusedError) as error:
                self.note(f"no corrections are applied: {error.what}")
                return FoundCorrections()

    def _question(self, model: Model, numbers: Quantizer, judge: Judge) -> Question:
        """The question about this model, which is the case's or an equalized one."""
        rules, labels = self.case.quantize, self.space.everything()
        given = () if self.case.inputs.scales is None else NEED_RANGES
        return Question(
            model=model,
            judge=replace(judge, model=model),
            numbers=numbers,
            sites=tuple(dict.fromkeys(s for p in judge.placements for s in p.ordered)),
            units=tuple(labels),
            place=lambda units: self.space.resolve({unit: labels[unit] for unit in units}),
            without=self._judged,
            first=self.first,
            ranges=partial(self.ranges, model),
            fit_ranges=partial(self.fit_ranges, model),
            method=rules.calibration,
            observe=partial(self._observed, model),
            allowed=tuple(name for name in rules.allowed_corrections if name not in given),
            saturates=self.backend.capabilities(self.options).reduce_range,
            fixed=self.fixed,
            equalized=lambda other, tensors: self._question(other, self.recalibrated(other, tensors), judge),
            seconds=self._seconds,
        )

    def _judged(self, without: Collection[str] = ()) -> tuple[Placement, ...]:
        """The placements that corrections are judged on; the ``first`` one is the last, whatever is left out."""
        usual = _with_halves(judged_placements(self.space, without))
        return usual if self.first is None else tuple(dict.fromkeys((*usual, self.first)))

    @property
    def _seconds(self) -> float:
        most, minutes = SECONDS[self.case.tune.preset], self.case.tune.minutes
        return most if minutes is None else min(most, SHARE * 60 * minutes)

    def _observed(
        self, model: Model, tensors: Sequence[str], feeds: Iterable[Feed]
    ) -> Iterator[Mapping[str, Array]]:
        """The values of these tensors of a model for each input."""
        inputs = set(model.inputs)
        observer = observe(model, [tensor for tensor in tensors if tensor not in inputs])
        with ExitStack() as observers:
            execute = self.run(observers, observer.parts) if observer.names else None
            for feed in feeds:
                found = {} if execute is None else observer.seen(execute(feed))
                yield {**{name: feed[name] for name in tensors if name in feed}, **found}


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
