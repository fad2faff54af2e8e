"""The search of one case that times candidates, up to its confirmation; a search for coverage shares its parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from qdqspec._core.files import Closing, TemporaryFolder
from qdqspec._core.progress import Deadline
from qdqspec._core.registry import resolve
from qdqspec._core.units import metric_text
from qdqspec.accuracy import Evaluator, Runs
from qdqspec.app.evidence.timing import clock_for
from qdqspec.app.preparation.files import CandidateFiles
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.start import warm_starts
from qdqspec.app.preparation.stored import LoggedJournal
from qdqspec.app.session.oracle import RehearsalOracle, RehearsedMetric, Rehearser
from qdqspec.backends import engines_at_once
from qdqspec.errors import BackendError, DataError, PlacementError
from qdqspec.qdq import SchemeSpace
from qdqspec.search import (
    Contest,
    Limits,
    MetricLimit,
    Proposal,
    Search,
    SearchSetup,
    Strategy,
    profiled,
)
from qdqspec.timing import CONFIRM_BUILDS, Bench, preload_scipy
from qdqspec.types import (
    GIVEN,
    TIMED_TRIALS,
    TRIALS,
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

    ``make`` makes a strategy, called ``name``, that replaces the one of the case. Run ``search`` whole or step by step.
    Its processes stop when it is closed.
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
                looks=prepared.capabilities.computes,
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
        converted_from=prepared.converted_from,
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
