"""The search of one case: limits, corrections, strategy, loop, confirmation, result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from qdqspec.accuracy.constraint import NO_PLACEMENT, AccuracyConstraint, constraint_of
from qdqspec.accuracy.expected_metric import RehearsedMetric
from qdqspec.accuracy.oracle import RehearsalOracle
from qdqspec.accuracy.rehearser import Rehearser
from qdqspec.deadline import Deadline
from qdqspec.errors import PlacementError
from qdqspec.graph.model import require_path
from qdqspec.graph.weights import WeightStore
from qdqspec.measurement.bench import CONFIRM_BUILDS, Bench
from qdqspec.measurement.drift import DriftMonitor
from qdqspec.measurement.stats import preload_scipy
from qdqspec.placement.edit.insert import Inserter
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.build_logs import BuildLogs
from qdqspec.preparation.candidates import CandidateFiles, PartFiles, plain_file
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.preparation.start import Start, warm_starts
from qdqspec.preparation.timing import clock_for
from qdqspec.registry import resolve
from qdqspec.search.base import Proposal, SearchSetup, Strategy, profiled
from qdqspec.search.loop import Contest, Search
from qdqspec.search.repair import NearMiss, repaired
from qdqspec.session.confirm import FINALISTS
from qdqspec.session.outcome import Tuned, finish
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import GIVEN, TIMED_TRIALS, TRIALS, Clock, Placement, TuneRules

MakeStrategy: TypeAlias = Callable[[SearchSetup, np.random.Generator], Strategy]


def tune_case(prepared: Prepared, journal: BuildLogs) -> Tuned:
    """The whole search of a case: each trial is in the journal before the next one begins."""
    with open_tuning(prepared, journal) as tuning:
        tuning.search.run()  # propose, rehearse, build, race; tell the strategy
        tuning.repair()  # candidates that just missed the SQNR limit
        return tuning.confirm()  # finalists, built anew and timed together


@contextmanager
def open_tuning(
    prepared: Prepared,
    journal: BuildLogs,
    *,
    make: MakeStrategy | None = None,
    name: str | None = None,
) -> Iterator[Tuning]:
    """Prepare the search of a case: all steps before its first build. Its processes stop at the end of the ``with``.

    It resumes where ``journal`` ends. ``make`` makes a strategy, called ``name``, that replaces the one of the case.
    """
    rules, resources = prepared.case.tune, prepared.resources
    started = time.monotonic(), time.process_time()
    make = make or named(rules.strategy)
    refuse(make, prepared.candidates)
    # Separate generators, so that a resumed run, which measures less, asks for the same placements.
    for_strategy, for_bench = np.random.default_rng(resources.settings.seed).spawn(2)
    preload_scipy()
    resources.report_step("calibrating")
    trials = trials_of(rules, prepared.space, make)
    resources.report_step("running the reference")
    constraint = constraint_of(prepared)
    deadline = Deadline(
        seconds=None if rules.minutes is None else 60 * rules.minutes,
        waited=resources.waited,
        run_left=resources.seconds_left,
    )
    resources.report_step("looking for corrections")
    _ = prepared.corrections  # before the loop: all candidates have the same numbers
    with ExitStack() as opened:
        folder = opened.enter_context(TemporaryFolder())
        bench = opened.enter_context(closing(_bench(prepared, folder, for_bench, deadline)))
        oracle = _oracle(prepared, constraint, deadline, opened)
        setup = _setup(prepared, constraint, bench.clock, trials, oracle, _starts(prepared, resources))
        search = Search(
            make(setup, for_strategy),
            Contest(bench, constraint.admission),
            deadline,
            journal,
            case=prepared.case.name,
            most_trials=trials,
            confirming=CONFIRM_BUILDS * (FINALISTS + (prepared.quantized is not None)),
            replay=journal.trials(),
            given=_given(prepared),
            watch=resources.watch,
        )
        yield Tuning(
            prepared=prepared,
            strategy=name or rules.strategy,
            make=make,
            constraint=constraint,
            folder=folder,
            bench=bench,
            oracle=oracle,
            search=search,
            started=started,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A search that `open_tuning` has prepared: run ``search`` whole or step by step, then `repair`, then `confirm`.

    ``strategy`` is the name of the strategy that ``make`` makes; candidates are written to ``folder``. ``started`` are
    the elapsed and the CPU time of this process when its preparation began.
    """

    prepared: Prepared
    strategy: str
    make: MakeStrategy
    constraint: AccuracyConstraint
    folder: Path
    bench: Bench
    oracle: RehearsalOracle | None
    search: Search
    started: tuple[float, float]

    @property
    def usual_trials(self) -> int:
        """The number of builds of this search without a time limit."""
        rules = replace(self.prepared.case.tune, minutes=None)
        return trials_of(rules, self.prepared.space, self.make)

    def repair(self) -> None:
        """Race the fastest candidates that just missed the SQNR limit, without their noisiest units.

        Only if nothing has won, or only a much slower candidate.
        """
        limits, oracle = self.constraint.limits, self.oracle
        if limits.min_sqnr_db is None or oracle is None or self.prepared.case.tune.objective == "pareto":
            return
        near_miss = NearMiss(
            sqnr_db=self.constraint.sqnr_db, least_db=limits.min_sqnr_db, min_gain=limits.min_gain
        )
        for placement in repaired(self.search.trials, near_miss, oracle, self.prepared.space):
            if self.search.deadline.reached:
                return
            trial = self.search.evaluate_also(Proposal(placement=placement, phase="repair"))
            oracle.learn(trial)
            if trial.incumbent:
                return

    def confirm(self) -> Tuned:
        """Rebuild the finalists, time them together, and select the final model."""
        return finish(self)


def _bench(prepared: Prepared, folder: Path, random: np.random.Generator, deadline: Deadline) -> Bench:
    """A bench that writes candidates to ``folder``."""
    resources = prepared.resources
    store = WeightStore(folder, base=require_path(prepared.given).parent)
    inserter = Inserter(prepared.model, prepared.numbers, store=store)
    clock = clock_for(prepared.case.tune, resources.settings.threads)
    return Bench(
        resources.backend,
        CandidateFiles(
            folder,
            plain_file(prepared, folder),
            lambda placement: inserter.insert(prepared.space.permitted(placement)).parts,
            None if prepared.quantized is None else prepared.quantized.file,
        ),
        prepared.loads,
        clock=clock,
        random=random,
        options=resources.options,
        exclusive=resources.exclusive,
        # the states of a simulated device would last no time
        looks=DriftMonitor(clock=clock, random=random) if _computes(resources) else None,
        extract=PartFiles(prepared, folder, store),
        folder=folder,
        jobs=resources.jobs,
        engines=resources.engines,
        report=lambda text: resources.report_step(f"timing fresh builds: {text}", deadline.left),
    )


def _oracle(
    prepared: Prepared,
    constraint: AccuracyConstraint,
    deadline: Deadline,
    opened: ExitStack,
) -> RehearsalOracle | None:
    """The oracle of a search with accuracy constraints or objective; ``None`` on a simulated device."""
    resources = prepared.resources
    if constraint.admission is None or not prepared.space.units or not _computes(resources):
        return None
    rehearser = opened.enter_context(Rehearser(prepared, prepared.comparison_data()))
    metric = None
    if constraint.rules is not None and constraint.min_accuracy is not None:
        reference = constraint.score(NO_PLACEMENT)
        assert reference is not None  # it was computed for the limit
        metric = RehearsedMetric(prepared.scores, constraint.rules, reference, constraint.min_accuracy)
    return RehearsalOracle(
        rehearser,
        prepared.space,
        prepared.note_once,
        lambda: deadline.left,
        metric,
        constraint.min_sqnr_db,
        constraint.admission.difference,
    )


def _computes(resources: Resources) -> bool:
    """Whether the device computes outputs; a simulated one does not."""
    return resources.backend.capabilities(resources.options).computes


def _setup(
    prepared: Prepared,
    constraint: AccuracyConstraint,
    clock: Clock,
    trials: int,
    oracle: RehearsalOracle | None,
    starts: Sequence[Placement],
) -> SearchSetup:
    """The setup of a strategy, which starts from these placements."""
    rules = prepared.case.tune
    return SearchSetup(
        space=prepared.space,
        clock=clock,
        preset=rules.preset,
        trials=trials,
        trials_per_region=rules.trials_per_region,
        validate_groups=rules.validate_groups,
        seeds=tuple(dict.fromkeys(placement for placement in starts if placement.sites)),
        min_sqnr_db=constraint.min_sqnr_db,
        min_accuracy=constraint.min_accuracy,
        pareto=rules.objective == "pareto",
        fused=prepared.fused,
        accuracy=oracle,
    )


def _starts(prepared: Prepared, resources: Resources) -> list[Placement]:
    """The placements that the case starts from."""
    device = resources.backend.device(resources.options).key
    start = Start(
        space=prepared.space, backend=resources.backend.target, device=device, note=prepared.warnings.append
    )
    return list(warm_starts(prepared.case.tune.start_from, start))


def _given(prepared: Prepared) -> Proposal | None:
    """The model as given as a candidate, if it is quantized and the spec excludes nothing of what it quantizes."""
    if prepared.quantized is None:
        return None
    placement = prepared.quantized.placement
    try:
        return profiled(prepared.space.permitted(placement), GIVEN)
    except PlacementError as error:
        prepared.note_once(f"the model as given is no candidate: {error.what}")
        return None


def named(strategy: str) -> MakeStrategy:
    """The strategy of that name; raises `ConfigError` naming the closest one if there is none."""
    return cast("MakeStrategy", resolve("strategy", strategy))


def refuse(make: MakeStrategy, space: SchemeSpace) -> None:
    """Raise `ConfigError` if a strategy reports that it cannot search a space."""
    own: Callable[[SchemeSpace], None] = getattr(make, "refuse", lambda _: None)
    own(space)


def trials_of(rules: TuneRules, space: SchemeSpace, make: MakeStrategy | None = None) -> int:
    """The number of search builds: as requested, else by the strategy or the preset.

    A strategy may define its own budget as a function ``default_trials(preset, space)``; one that takes
    ``trials_per_region`` gets it as a third argument.
    """
    if rules.trials is not None:
        return rules.trials
    own: Callable[..., int] | None = getattr(make or named(rules.strategy), "default_trials", None)
    if own is None:
        return (TRIALS if rules.minutes is None else TIMED_TRIALS)[rules.preset]
    each = () if rules.trials_per_region is None else (rules.trials_per_region,)
    return own(rules.preset, space, *each)
