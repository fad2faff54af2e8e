"""The searches of one case: one that times candidates, up to its confirmation, and one for coverage, without timing.

Rehearsals predict the accuracy of placements. In a search for coverage the backend builds what is selected, and lists
its kernels. The outputs of the model decide, as the backend computes them or, where it only builds, as ONNX defines
them; they correct the next rehearsals.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from qdqspec._core.files import Closing, TemporaryFolder
from qdqspec._core.progress import Deadline
from qdqspec._core.registry import resolve
from qdqspec._core.units import count_text, metric_text, share_text
from qdqspec.accuracy import Evaluator, Runs
from qdqspec.app.evidence.timing import clock_for
from qdqspec.app.preparation.files import CandidateFiles
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import runner
from qdqspec.app.preparation.start import warm_starts
from qdqspec.app.preparation.stored import LoggedJournal
from qdqspec.app.session.oracle import RehearsalOracle, RehearsedMetric, Rehearser
from qdqspec.backends import engines_at_once
from qdqspec.errors import BackendError, ConfigError, DataError, PlacementError
from qdqspec.graph import FLOAT16
from qdqspec.graph.regions import multiplications_by_node
from qdqspec.qdq import SchemeSpace
from qdqspec.search import (
    Contest,
    CoverageSearch,
    Limits,
    MetricLimit,
    Proposal,
    Search,
    SearchSetup,
    Strategy,
    profiled,
    repaired,
)
from qdqspec.timing import CONFIRM_BUILDS, Bench, DriftMonitor, preload_scipy
from qdqspec.types import (
    GIVEN,
    NO_PAIRS,
    TIMED_TRIALS,
    TRIALS,
    Coverage,
    Interval,
    LatencyEvidence,
    Placement,
    SearchResult,
    Trial,
    TuneRules,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of a search: its result, the confirming measurement if it times, and the winner before it.

    ``confirmed`` are the finalists' lines for the journal, by role, ``intervals`` confirmed ratios by digest.
    """

    result: SearchResult
    latency: LatencyEvidence | None
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]
    intervals: Mapping[str, Interval]


def limits_of(prepared: Prepared, *, all_data_share: float = 0.05) -> Limits:
    """The limits of a case's search; builds and runs the reference if there are any.

    ``all_data_share`` of the time may go to one candidate on all data: a smaller share means that fewer samples decide.
    """
    asked = prepared.case.tune
    measures_db = asked.objective == "pareto" or asked.limits.min_sqnr_db is not None
    if not measures_db and asked.accuracy is None:
        return Limits(asked=asked.limits)
    metric = None
    if (rules := asked.accuracy) is not None:
        scores, name = prepared.scores, rules.metric
        reference = scores.of_reference(name, rules.output).value

        def score(engine: Runs) -> float:
            """The metric of a candidate; an error of the metric is a failure of the candidate."""
            try:
                value = scores.of_engine(engine, name, rules.output).value
            except DataError as error:
                raise BackendError(error.what, where=error.where) from error
            if not math.isfinite(value):
                raise BackendError(f"metric '{name}' gave {value} for this candidate")
            return value

        if rules.min is not None and reference < rules.min:
            own, least = metric_text(name, reference), metric_text(name, rules.min)
            prepared.warnings.append(
                f"tune.accuracy: the reference itself has {name} {own}, below the limit {least}"
            )
        metric = MetricLimit(
            least=rules.least(reference),
            rules=rules,
            reference=reference,
            samples=scores.samples,
            score=score,
        )
    feeds, _ = prepared.comparison_data()
    seconds = math.inf if asked.minutes is None else all_data_share * 60 * asked.minutes
    evaluator = Evaluator(feeds, prepared.build_expected, len(feeds), seconds=seconds)
    return Limits(
        asked=asked.limits,
        metric=metric,
        first_samples=evaluator.first,
        all_data=evaluator if evaluator.samples > evaluator.few else None,
        confirms_sqnr=measures_db,
    )


FINALISTS = 4  # reference, winner, runner-up and everything quantized
MakeStrategy: TypeAlias = Callable[[SearchSetup, np.random.Generator], Strategy]


class Tuning(Closing):
    """The search of a case. It is opened by all steps before its first build, and resumes where ``journal`` ends.

    ``make`` makes a strategy, called ``name``, that replaces the one of the case. Run ``search`` whole or step by step,
    then `repair`. Its processes stop when it is closed.
    """

    def __init__(
        self,
        prepared: Prepared,
        journal: LoggedJournal,
        *,
        make: MakeStrategy | None = None,
        name: str | None = None,
    ) -> None:
        rules, resources = prepared.case.tune, prepared.resources
        self.prepared, self.strategy = prepared, name or rules.strategy
        self.started = time.monotonic(), time.process_time()
        self.make = strategy_for(prepared, make)
        # Separate generators, so that a resumed run, which measures less, asks for the same placements.
        for_strategy, for_bench = np.random.default_rng(resources.settings.seed).spawn(2)
        preload_scipy()
        resources.report_step("calibrating")
        trials = trials_of(rules, prepared.space, self.make)
        resources.report_step("running the reference")
        self.limits = limits = limits_of(prepared)
        deadline = deadline_of(prepared)
        resources.report_step("looking for corrections")
        _ = prepared.corrections  # before the loop: all candidates have the same numbers
        with ExitStack() as opened:
            self.folder = opened.enter_context(TemporaryFolder())
            clock, files = clock_for(rules, prepared.settings.threads), CandidateFiles(prepared, self.folder)
            on_cores = prepared.capabilities.hardware == "cpu"
            bench = Bench(
                resources.backend,
                files.whole,
                prepared.loads,
                clock=clock,
                random=for_bench,
                options=resources.options,
                exclusive=resources.exclusive,
                # the states of a simulated device would last no time
                looks=DriftMonitor(clock=clock, random=for_bench) if prepared.capabilities.computes else None,
                extract=files.part,
                folder=self.folder,
                jobs=resources.jobs,
                engines=engines_at_once(resources.options.threads) if on_cores else 1,
                report=lambda text: resources.report_step(f"timing fresh builds: {text}", deadline.left),
            )
            self.bench = opened.enter_context(closing(bench))
            self.oracle = oracle_of(prepared, limits, deadline, opened)
            setup = SearchSetup(
                space=prepared.space,
                preset=rules.preset,
                trials=trials,
                trials_per_region=rules.trials_per_region,
                validate_groups=rules.validate_groups,
                seeds=tuple(dict.fromkeys(start for start in warm_starts(prepared) if start.sites)),
                limits=limits,
                pareto=rules.objective == "pareto",
                fused=prepared.fused,
                accuracy=self.oracle,
            )
            self.search = Search(
                self.make(setup, for_strategy),
                Contest(self.bench, limits),
                deadline,
                journal,
                case=prepared.case.name,
                most_trials=trials,
                confirming=CONFIRM_BUILDS * (FINALISTS + (prepared.quantized is not None)),
                replay=journal.trials(),
                given=given_candidate(prepared),
                watch=resources.watch,
            )
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Stop the processes of the search."""
        self._opened.close()

    def repair(self) -> None:
        """Race near misses of the SQNR limit without their noisiest units, if nothing, or only a slow one, has won."""
        limits, oracle = self.limits, self.oracle
        if limits.min_sqnr_db is None or oracle is None or self.prepared.case.tune.objective == "pareto":
            return
        for placement in repaired(self.search.trials, limits, oracle, self.prepared.space):
            if self.search.deadline.reached:
                return
            trial = self.search.evaluate(Proposal(placement=placement, phase="repair"))
            oracle.learn(trial)
            if trial.incumbent:
                return


def result_of(prepared: Prepared, started: tuple[float, float], **found: Any) -> SearchResult:
    """The result of a search that ends now: what a search of any kind found, and the figures of its case."""
    return SearchResult(
        seconds=time.monotonic() - started[0],
        cpu_seconds=time.process_time() - started[1],
        blocks=len(prepared.space.units),
        regions=len(prepared.regions),
        patterns=len({region.pattern for region in prepared.regions}),
        limits=prepared.case.tune.limits,
        corrections=prepared.corrections.gains,
        converted_from=FLOAT16 if prepared.is_converted else "",
        **found,
    )


def deadline_of(prepared: Prepared) -> Deadline:
    """The end of a search that begins now: the time limit of its case, and that of the run."""
    minutes, resources = prepared.case.tune.minutes, prepared.resources
    seconds = None if minutes is None else 60 * minutes
    return Deadline(seconds=seconds, waited=lambda: sum(resources.waits), run_left=resources.seconds_left)


def oracle_of(
    prepared: Prepared, limits: Limits, deadline: Deadline, opened: ExitStack
) -> RehearsalOracle | None:
    """The rehearsal of placements; ``None`` if accuracy is not measured, or the device simulated."""
    if not limits.are_measured or not prepared.space.units or not prepared.capabilities.computes:
        return None
    rehearser = opened.enter_context(Rehearser(prepared, prepared.comparison_data()))
    return RehearsalOracle(
        rehearser,
        prepared.space,
        prepared.note_once,
        lambda: deadline.left,
        metric=None if limits.metric is None else RehearsedMetric(prepared.scores, limits.metric),
        least_db=limits.min_sqnr_db,
        difference=limits.difference,
    )


def given_candidate(prepared: Prepared) -> Proposal | None:
    """The model as given as a candidate, if it is quantized and the spec excludes nothing of what it quantizes."""
    if prepared.quantized is None:
        return None
    placement = Placement(sites=prepared.quantized.imported.placement.sites, given=True)
    try:
        return profiled(prepared.space.permitted(placement), GIVEN)
    except PlacementError as error:
        prepared.note_once(f"the model as given is no candidate: {error.what}")
        return None


def named(strategy: str) -> MakeStrategy:
    """The strategy of that name; raises `ConfigError` naming the closest one if there is none."""
    return cast("MakeStrategy", resolve("strategy", strategy))


def strategy_for(prepared: Prepared, make: MakeStrategy | None = None) -> MakeStrategy:
    """The strategy of a case, or another one. Raises `ConfigError` if it cannot search the placements of the case."""
    make = make or named(prepared.case.tune.strategy)
    refuse: Callable[[SchemeSpace], None] | None = getattr(make, "refuse", None)
    if refuse is not None:
        refuse(prepared.candidates)
    return make


def trials_of(rules: TuneRules, space: SchemeSpace, make: MakeStrategy) -> int:
    """The number of search builds: as requested, else by the strategy or the preset.

    A strategy may define its own budget as a function ``default_trials(preset, space)``; one that takes
    ``trials_per_region`` gets it as a third argument.
    """
    if rules.trials is not None:
        return rules.trials
    own: Callable[..., int] | None = getattr(make, "default_trials", None)
    if own is None:
        return (TRIALS if rules.minutes is None else TIMED_TRIALS)[rules.preset]
    each = () if rules.trials_per_region is None else (rules.trials_per_region,)
    return own(rules.preset, space, *each)


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


def cover_case(prepared: Prepared, journal: LoggedJournal) -> Tuned:
    """The placement with the most narrow multiplications. Raises `BackendError` if the model does not build."""
    started = time.monotonic(), time.process_time()
    counts = multiplications_by_node(prepared.folded, prepared.shapes)
    space, given, activations = prepared.space, given_candidate(prepared), prepared.capabilities.activations
    with ExitStack() as opened:
        covering = _Covering(prepared, journal, opened)
        oracle, least_db = covering.oracle, prepared.case.tune.limits.min_sqnr_db
        reference = covering.build(NO_PAIRS)
        if not reference.ok:
            raise BackendError(f"the model does not build without any Q/DQ: {reference.error}")
        search = CoverageSearch(
            space=space,
            multiplications={unit.id: sum(counts.get(n, 0) for n in unit.nodes) for unit in space.units},
            noise=lambda: None if oracle is None else oracle.noise(),
            is_accurate=covering.is_expected_within_limits,
            keeps_limits=covering.keeps_limits,
            build=covering.build,
            is_over=lambda: bool(covering.limit_reached),
            narrow=frozenset({*activations, *activations.values()}),
            given=None if given is None else given.placement,
        )
        best = search.best()
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
    refused, limit = count_text(len(search.refused), "unit"), ""
    lost = f"; {refused} left in float because of the backend" if search.refused else ""
    if least_db is not None:
        limit = f" with an SQNR of at least {least_db:g} dB"
    own = "the given model's own placement: " if winner.given else ""
    reason = f"{share_text(coverage.share)} of the multiplications are quantized{limit}{lost}"
    if not coverage.quantized:
        reason = f"no placement{limit} that the backend builds quantizes a multiplication{lost}"
    result = result_of(
        prepared,
        started,
        winner=winner,
        trials=tuple(covering.trials),
        unchanged=best is None,
        reason=prepared.nothing or own + reason,
        strategy=COVERAGE,
        eps=0.0,
        ended_by=covering.limit_reached,
        accuracy=covering.limits.bound(winner),
        errors=() if oracle is None else oracle.errors,
        coverage=coverage,
    )
    line = ("winner", replace(selected, phase="confirm"))
    return Tuned(result=result, latency=None, raw_winner=winner, confirmed=(line,), intervals={})


class _Covering:
    """The builds of a search for coverage, that of the reference first, and the limits on accuracy."""

    def __init__(self, prepared: Prepared, journal: LoggedJournal, opened: ExitStack) -> None:
        self.prepared, self.trials = prepared, list[Trial]()
        self._journal, self._recorded = journal, list(journal.trials())
        self._deadline, resources = deadline_of(prepared), prepared.resources
        resources.report_step("looking for corrections")
        _ = prepared.corrections  # before the search: all placements have the same numbers
        self.limits = limits_of(prepared)
        self.oracle = oracle_of(prepared, self.limits, self._deadline, opened)
        self._folder = opened.enter_context(TemporaryFolder())
        self._runs = runner(resources.backend, resources.options)
        self._file = CandidateFiles(prepared, self._folder).whole

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
            with closing(prepared.backend.build(self._file(placement), prepared.options)) as engine:
                trial = replace(trial, build_seconds=time.perf_counter() - started)
                engine.bind(prepared.loads[0].feeds)
                # the profile of a single run is no measurement
                kernels = tuple(replace(layer, milliseconds=0.0) for layer in engine.layers(1))
            trial = replace(trial, graph_hash=engine.graph_hash, layers=kernels)
        except (BackendError, PlacementError) as error:
            text, seconds = str(error).replace(f"{self._folder}{os.sep}", ""), time.perf_counter() - started
            trial = replace(trial, status="failed", error=text, build_seconds=seconds)
        self._journal.append(trial)
        self.trials.append(trial)
        return trial

    def is_expected_within_limits(self, placement: Placement) -> bool:
        """Whether a placement is expected to meet the limits; one that cannot be rehearsed is left to its outputs."""
        oracle, least_db = self.oracle, self.limits.min_sqnr_db
        expected_db = None if oracle is None else oracle.predicted_db(placement)
        if expected_db is not None and least_db is not None and expected_db < least_db:
            return False
        return oracle is None or oracle.keeps_metric(placement) is not False

    def keeps_limits(self, trial: Trial) -> bool:
        """Whether a placement meets the limits by the outputs of its model, from which rehearsals learn."""
        limits, placement = self.limits, trial.placement
        if limits.are_measured and not limits.is_known(placement):
            self.prepared.resources.report_step("measuring the accuracy of a candidate")
            with closing(self._runs(self._file(placement))) as engine:
                trial = limits.measure(Trial(number=0, phase=COVERAGE, placement=placement), engine)
                limits.confirm(placement, engine)
            if self.oracle is not None:
                self.oracle.learn(replace(trial, accuracy=limits.figures(placement).score))
        return limits.admits(placement)
