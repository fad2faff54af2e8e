"""The search of one case without timing: objective ``coverage``, `qdqspec.search.coverage` on a prepared case.

Rehearsals predict the accuracy of a placement. The backend builds what is selected, and lists its kernels. The outputs
of the model decide, as the backend computes them or, where it only builds, as ONNX defines them; they correct the next
rehearsals.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import replace

from qdqspec._core.files import TemporaryFolder
from qdqspec._core.units import count_text, share_text
from qdqspec.app.preparation.auxiliary_runs import runner
from qdqspec.app.preparation.build_logs import LoggedJournal
from qdqspec.app.preparation.candidates import CandidateFiles
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session.outcome import Tuned
from qdqspec.app.session.tuning import deadline_of, given_candidate, limits_of, oracle_of, result_of
from qdqspec.errors import BackendError, ConfigError, PlacementError
from qdqspec.graph.regions.forecast import multiplications_by_node
from qdqspec.search.coverage import CoverageSearch
from qdqspec.types import GIVEN, NO_PAIRS, TIMED_TRIALS, Coverage, Placement, SearchResult, Trial

NAME = "coverage"  # the objective, the strategy in results, and the phase in the journal


def covers(prepared: Prepared) -> bool:
    """Whether a case is searched without timing: as asked, or as its backend has no clock. Raises `ConfigError`."""
    asked, has_clock = prepared.case.tune.objective, prepared.capabilities.has_clock
    if asked is None:
        return not has_clock
    if asked != NAME and not has_clock:
        raise ConfigError(
            f"objective '{asked}' needs times, and backend {prepared.backend.name} takes none on this machine",
            where=str(prepared.case.spec or prepared.case.model),
            cure="leave tune.objective out, or set it to coverage",
        )
    return asked == NAME


def cover_case(prepared: Prepared, journal: LoggedJournal) -> Tuned:
    """The placement with the most narrow multiplications. Raises `BackendError` if the model does not build."""
    with ExitStack() as opened:
        covering = _Covering(prepared, journal, opened)
        reference = covering.build(NO_PAIRS)
        if not reference.ok:
            raise BackendError(f"the model does not build without any Q/DQ: {reference.error}")
        search = covering.search()
        best = search.best()
        result = covering.result(search, best)
    line = ("winner", replace(best or reference, phase="confirm"))
    return Tuned(result=result, latency=None, raw_winner=result.winner, confirmed=(line,), intervals={})


def _reason(search: CoverageSearch, coverage: Coverage, least_db: float | None) -> str:
    units = count_text(len(search.refused), "unit")
    lost = f"; {units} left in float because of the backend" if search.refused else ""
    limit = "" if least_db is None else f" with an SQNR of at least {least_db:g} dB"
    if not coverage.quantized:
        return f"no placement{limit} that the backend builds quantizes a multiplication{lost}"
    return f"{share_text(coverage.share)} of the multiplications are quantized{limit}{lost}"


class _Covering:
    """One search: its builds, that of the reference first, and the limits on accuracy."""

    def __init__(self, prepared: Prepared, journal: LoggedJournal, opened: ExitStack) -> None:
        self.prepared, self.trials = prepared, list[Trial]()
        self._journal, self._recorded = journal, list(journal.trials())
        self._started = time.monotonic(), time.process_time()
        self._deadline, resources = deadline_of(prepared), prepared.resources
        resources.report_step("looking for corrections")
        _ = prepared.corrections  # before the search: all placements have the same numbers
        self._limits = limits_of(prepared)
        self._least_db = prepared.case.tune.limits.min_sqnr_db
        self._oracle = oracle_of(prepared, self._limits, self._deadline, opened)
        self._folder = opened.enter_context(TemporaryFolder())
        self._runs = runner(resources.backend, resources.options)
        self._file = CandidateFiles(prepared, self._folder).whole
        self._multiplications = multiplications_by_node(prepared.folded, prepared.shapes)

    @property
    def limit_reached(self) -> str:
        """The limit that the search has reached, as text; empty if it may go on."""
        rules = self.prepared.case.tune
        most = rules.trials or TIMED_TRIALS[rules.preset]
        if len(self.trials) > most:
            return f"its limit of {count_text(most, 'build')}"
        return self._deadline.reached

    def build(self, placement: Placement) -> Trial:
        """The trial of a placement: recorded by an earlier run, else built now. A failed build is a trial too."""
        number = len(self.trials)
        self.prepared.resources.report_step(
            f"building {f'candidate {number}' if number else 'the reference'}"
        )
        known = self._recorded[number] if number < len(self._recorded) else None
        if known is not None and known.placement.digest == placement.digest:
            trial = known
        else:
            self._recorded = []
            trial = self._built(number, placement)
            self._journal.append(trial)
        self.trials.append(trial)
        return trial

    def _built(self, number: int, placement: Placement) -> Trial:
        started, prepared = time.perf_counter(), self.prepared
        blank = Trial(number=number, phase=GIVEN if placement.given else NAME, placement=placement)
        try:
            with closing(prepared.backend.build(self._file(placement), prepared.options)) as engine:
                blank = replace(blank, build_seconds=time.perf_counter() - started)
                engine.bind(prepared.loads[0].feeds)
                layers = engine.layers(1)
        except (BackendError, PlacementError) as error:
            text = str(error).replace(f"{self._folder}{os.sep}", "")
            return replace(blank, status="failed", error=text, build_seconds=time.perf_counter() - started)
        # the profile of a single run is no measurement
        kernels = tuple(replace(layer, milliseconds=0.0) for layer in layers)
        return replace(blank, graph_hash=engine.graph_hash, layers=kernels)

    def _is_expected_within_limits(self, placement: Placement) -> bool:
        """Whether a placement is expected to meet the limits; one that cannot be rehearsed is left to its outputs."""
        if self._oracle is None:
            return True
        expected_db = self._oracle.predicted_db(placement)
        if expected_db is not None and self._least_db is not None and expected_db < self._least_db:
            return False
        return self._oracle.keeps_metric(placement) is not False

    def _keeps_limits(self, trial: Trial) -> bool:
        """Whether a placement meets the limits by the outputs of its model, from which rehearsals learn."""
        limits, placement = self._limits, trial.placement
        if limits.are_measured and not limits.is_known(placement):
            self.prepared.resources.report_step("measuring the accuracy of a candidate")
            with closing(self._runs(self._file(placement))) as engine:
                trial = limits.measure(Trial(number=0, phase=NAME, placement=placement), engine)
                limits.confirm(placement, engine)
            if self._oracle is not None:
                self._oracle.learn(replace(trial, accuracy=limits.figures(placement).score))
        return limits.admits(placement)

    def search(self) -> CoverageSearch:
        """The search on the space of the case."""
        space, counts, oracle = self.prepared.space, self._multiplications, self._oracle
        activations, given = self.prepared.capabilities.activations, given_candidate(self.prepared)
        return CoverageSearch(
            space=space,
            multiplications={unit.id: sum(counts.get(n, 0) for n in unit.nodes) for unit in space.units},
            noise=lambda: None if oracle is None else oracle.noise(),
            is_accurate=self._is_expected_within_limits,
            keeps_limits=self._keeps_limits,
            build=self.build,
            is_over=lambda: bool(self.limit_reached),
            narrow=frozenset({*activations, *activations.values()}),
            given=None if given is None else given.placement,
        )

    def result(self, search: CoverageSearch, best: Trial | None) -> SearchResult:
        """The result of a search that selected this trial, by its labels and the list of its kernels."""
        prepared, oracle, selected = self.prepared, self._oracle, best or self.trials[0]
        winner, layers = selected.placement, () if best is None else best.layers
        coverage = Coverage(
            multiplications=sum(self._multiplications.values()),
            quantized=search.count(search.narrow_units(selected)),
            sqnr_db=None if best is None or oracle is None else oracle.predicted_db(winner),
            kernels=len(layers),
            conversions=sum(layer.boundary for layer in layers),
            refused=dict(search.refused),
        )
        own = "the given model's own placement: " if winner.given else ""
        return result_of(
            prepared,
            self._started,
            winner=winner,
            trials=tuple(self.trials),
            unchanged=best is None,
            reason=prepared.nothing or f"{own}{_reason(search, coverage, self._least_db)}",
            strategy=NAME,
            eps=0.0,
            ended_by=self.limit_reached,
            accuracy=self._limits.bound(winner),
            errors=() if oracle is None else oracle.errors,
            coverage=coverage,
        )
