"""The search of one case for coverage: the placement with the most narrow multiplications, built and not timed.

Rehearsals predict the accuracy of placements. The backend builds what is selected, and lists its kernels. The outputs
of the model decide, as the backend computes them or, where it only builds, as ONNX defines them; they correct the next
rehearsals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from qdqspec._core.units import count_text, list_text, plain, share_text
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import runner
from qdqspec.app.preparation.stored import LoggedJournal
from qdqspec.app.session.tuning import CaseSearch, Tuned
from qdqspec.errors import BackendError, ConfigError, PlacementError
from qdqspec.graph.regions import multiplications_by_node
from qdqspec.search import CoverageSearch, Guide
from qdqspec.types import GIVEN, NO_PAIRS, TIMED_TRIALS, Coverage, Placement, Trial

COVERAGE = "coverage"  # the objective, the strategy in results, and the phase in the journal


def covers(prepared: Prepared) -> bool:
    """Whether a case is searched without timing: as asked, or as its backend has no clock. Raises `ConfigError`."""
    asked, has_clock = prepared.case.tune.objective, prepared.capabilities.has_clock
    if asked is None:
        return not has_clock
    if asked != COVERAGE and not has_clock:
        raise ConfigError(
            f"objective '{asked}' needs times, and backend {prepared.backend.name} takes none on this machine",
            where=str(prepared.case.spec or prepared.case.model),
            cure="leave tune.objective out, or set it to coverage",
        )
    return asked == COVERAGE


class Covering(CaseSearch):
    """The search of a case for coverage. Its first build is that of the reference."""

    def __init__(self, prepared: Prepared, journal: LoggedJournal) -> None:
        started = time.monotonic(), time.process_time()
        counts = multiplications_by_node(
            prepared.folded, prepared.data.shapes, partial(_seen_shapes, prepared)
        )
        self.counts, self.uncounted = counts
        super().__init__(prepared, journal, started)
        self.trials, self._recorded = list[Trial](), list(journal.trials())
        # a build that misses the limits costs one more, and a margin multiplications
        self.guide = Guide(self.oracle, prepared.space, self.limits, doubt_share=0.0, close_db=0.1)
        self._runs = runner(prepared.backend, prepared.resources.options)

    def run(self) -> Tuned:
        """The placement with the most narrow multiplications. Raises `BackendError` if the model does not build."""
        prepared, oracle, counts = self.prepared, self.oracle, self.counts
        space, given, activations = prepared.space, self.given_candidate(), prepared.capabilities.activations
        least_db = prepared.case.tune.limits.min_sqnr_db
        reference = self.build(NO_PAIRS)
        if not reference.ok:
            raise BackendError(f"the model does not build without any Q/DQ: {reference.error}")
        search = CoverageSearch(
            space=space,
            multiplications={unit.id: sum(counts.get(n, 0) for n in unit.nodes) for unit in space.units},
            guide=self.guide,
            keeps_limits=self.keeps_limits,
            build=self.build,
            is_over=lambda: bool(self.limit_reached),
            narrow=frozenset({*activations, *activations.values()}),
            given=None if given is None else given.placement,
        )
        best = search.best()
        own_trial = next((trial for trial in self.trials if trial.placement.given), None)
        if best is None and own_trial is not None and prepared.case.tune.trials == 1:  # it is judged as it is
            if not own_trial.ok:
                raise BackendError(f"the model does not build as it is given quantized: {own_trial.error}")
            best = own_trial if self.keeps_limits(own_trial) else None
        selected = best or reference
        winner, layers = selected.placement, () if best is None else best.layers
        coverage = Coverage(
            multiplications=sum(counts.values()),
            quantized=search.count(search.narrow_units(selected)),
            sqnr_db=None if best is None or oracle is None else oracle.predicted_db(winner),
            kernels=len(layers),
            conversions=sum(layer.boundary for layer in layers),
            refused=dict(search.refused),
        )
        lost = list[str]()
        if search.refused:
            lost.append(f"{count_text(len(search.refused), 'unit')} left in float because of the backend")
        if self.uncounted:
            counted = f"{count_text(len(self.uncounted), 'node')} with unknown sizes or iterations"
            lost.append(
                f"{counted} counted as of size 1: {list_text([plain(name) for name in self.uncounted], 3)}"
            )
        if own_trial is not None and not own_trial.ok:
            lost.append(
                f"the given model's own placement does not build: {plain(own_trial.error or '', 300)}"
            )
        limit = "" if least_db is None else f" with an SQNR of at least {least_db:g} dB"
        own = "the given model's own placement: " if winner.given else ""
        found = f"{own}{share_text(coverage.share)} of the multiplications are quantized{limit}"
        if not coverage.quantized and not winner.given:
            found = f"no placement{limit} that the backend builds quantizes a multiplication"
        reason = "; ".join((found, *lost))
        result = self.result(
            winner=winner,
            trials=tuple(self.trials),
            unchanged=best is None,
            reason=prepared.nothing or reason,
            strategy=COVERAGE,
            eps=0.0,
            ended_by=self.limit_reached,
            accuracy=self.limits.bound(winner),
            errors=() if oracle is None else oracle.errors,
            coverage=coverage,
        )
        line = ("winner", replace(selected, phase="confirm"))
        return Tuned(result=result, latency=None, raw_winner=winner, confirmed=(line,), intervals={})

    @property
    def limit_reached(self) -> str:
        """The limit that the search has reached, as text; empty if it may go on."""
        rules = self.prepared.case.tune
        most = rules.trials or TIMED_TRIALS[rules.preset]
        if len(self.trials) > most:
            return f"its limit of {count_text(most, 'build')}"
        return self.deadline.reached

    def build(self, placement: Placement) -> Trial:
        """The trial of a placement: recorded by an earlier run, else built now. A failed build is a trial too."""
        number, prepared = len(self.trials), self.prepared
        step = f"building {f'candidate {number}' if number else 'the reference'}"
        prepared.resources.report_step(step)
        known = self._recorded[number] if number < len(self._recorded) else None
        if known is not None and known.placement.digest == placement.digest:
            self.trials.append(known)
            return known
        self._recorded = []
        started = time.perf_counter()
        trial = Trial(number=number, phase=GIVEN if placement.given else COVERAGE, placement=placement)
        try:
            with closing(prepared.backend.build(self.files.whole(placement), prepared.options)) as engine:
                trial = replace(trial, build_seconds=time.perf_counter() - started)
                engine.bind(prepared.loads[0].feeds)
                # the profile of a single run is no measurement
                kernels = tuple(replace(layer, milliseconds=0.0) for layer in engine.layers(1))
            trial = replace(trial, graph_hash=engine.graph_hash, layers=kernels)
        except (BackendError, PlacementError) as error:
            text, seconds = str(error).replace(f"{self.folder}{os.sep}", ""), time.perf_counter() - started
            trial = replace(trial, status="failed", error=text, build_seconds=seconds)
        self.journal.append(trial)
        self.trials.append(trial)
        return trial

    def keeps_limits(self, trial: Trial) -> bool:
        """Whether a placement meets the limits by the outputs of its model, from which rehearsals learn."""
        limits, placement = self.limits, trial.placement
        if limits.are_measured and not limits.is_known(placement):
            self.prepared.resources.report_step("measuring the accuracy of a candidate")
            with closing(self._runs(self.files.whole(placement))) as engine:
                trial = limits.measure(Trial(number=0, phase=COVERAGE, placement=placement), engine)
                limits.confirm(placement, engine)
            self.guide.learn(replace(trial, accuracy=limits.figures(placement).score))
        return limits.admits(placement)


def _seen_shapes(prepared: Prepared, tensors: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors in a run of the float model; empty if no runtime gives their values."""
    with suppress(BackendError):
        for values in prepared.values_of(prepared.folded, tensors, [prepared.data.sample]):
            return {name: value.shape for name, value in values.items()}
    return {}
