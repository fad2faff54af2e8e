"""The search of one case: `open_tuning` prepares it, `Tuning` runs it and confirms its winner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from qdqspec.accuracy.constraint import NO_PLACEMENT, AccuracyConstraint, constraint_of
from qdqspec.accuracy.oracle import RehearsalOracle, RehearsedMetric, Rehearser, SecondsLeft
from qdqspec.checks.rejected import why_text
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.graph.float32 import FLOAT16
from qdqspec.graph.model import require_path
from qdqspec.graph.weights import WeightStore
from qdqspec.measurement.bench import CONFIRM_BUILDS, FEW_ROUNDS, NOISE_BUILDS, Bench
from qdqspec.measurement.stats import preload_scipy
from qdqspec.measurement.together import Looks
from qdqspec.parity.gate import AllDataDifference
from qdqspec.placement.edit.insert import Inserter
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import is_arithmetic
from qdqspec.preparation.candidates import (
    CandidateFiles,
    PartFiles,
    note_float_types,
    other_references,
    plain_file,
)
from qdqspec.preparation.correcting import SECONDS, SHARE
from qdqspec.preparation.files import BuildLogs
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.preparation.start import Start, warm_starts
from qdqspec.preparation.timing import clock_for
from qdqspec.registry import resolve
from qdqspec.search.base import Proposal, SearchSetup, Strategy, profiled
from qdqspec.search.first import FirstPlacement
from qdqspec.search.loop import Budget, Search, candidates_of
from qdqspec.search.repair import NearMiss, repaired
from qdqspec.search.select import Selection, raw_winner
from qdqspec.session.confirm import FINALISTS, Confirmed, confirm
from qdqspec.session.cut_short import cut_short_text
from qdqspec.session.kernels import known_candidates, rejected_candidates
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import (
    FIRST,
    FLOAT32,
    GIVEN,
    TIMED_TRIALS,
    TRIALS,
    BlockError,
    Clock,
    Interval,
    LatencyEvidence,
    LayerTime,
    Placement,
    Progress,
    RejectedCandidate,
    SearchResult,
    Trial,
    TuneRules,
)
from qdqspec.units import count_text, interval_text, ratio_text

FIRST_SHARE = 0.15  # of the time limit, for the first placement that meets the limits
OVERTIME_SHARE = 0.25  # of the time limit, for candidates that just missed the SQNR limit
ERRORS_SHARE = 0.1  # of the time of a search, for the error of single blocks that it did not need

MakeStrategy: TypeAlias = Callable[[SearchSetup, np.random.Generator], Strategy]


@contextmanager
def open_tuning(
    prepared: Prepared,
    resources: Resources,
    journal: BuildLogs,
    *,
    make: MakeStrategy | None = None,
    name: str | None = None,
) -> Iterator[Tuning]:
    """Prepare the search of a case: all steps before its first build. Its processes stop at the end of the ``with``.

    It resumes where ``journal`` ends. ``make`` makes a strategy, called ``name``, that replaces the one of the case.
    """
    rules = prepared.case.tune
    steps = TimedSteps(resources, rules.minutes)
    make = make or named(rules.strategy)
    refuse(make, prepared.candidates)
    # Separate generators, so that a resumed run, which measures less, asks for the same placements.
    for_strategy, for_bench, for_first = np.random.default_rng(resources.settings.seed).spawn(3)
    preload_scipy()
    steps.report("calibrating")
    space = prepared.space
    steps.report("running the reference")
    constraint = constraint_of(prepared)
    trials = trials_of(rules, space, make)
    starts = _starts(prepared, resources)
    problem = _Problem(prepared=prepared, resources=resources, constraint=constraint)
    steps.begin()
    first, near = _find_corrections(problem, journal, for_first, starts, trials, steps)
    starts = [*near, *starts]
    with ExitStack() as opened:
        folder = opened.enter_context(TemporaryFolder())
        bench = opened.enter_context(
            closing(problem.bench(folder, for_bench, steps.report_builds, looks=True))
        )
        budget = Budget(
            trials=trials,
            seconds=None if rules.minutes is None else 60 * rules.minutes,
            used=steps.used_seconds,  # for the first placement and corrections
            confirming=CONFIRM_BUILDS * (FINALISTS + (prepared.quantized is not None)),
            waited=resources.waited,
            run_left=resources.seconds_left,
        )

        def seconds_left() -> float | None:
            return budget.left if steps.overtime_left is None else steps.overtime_left

        oracle = problem.oracle(opened, seconds_left)
        strategy = make(problem.setup(bench.clock, trials, oracle, starts), for_strategy)
        search = Search(
            strategy,
            bench,
            budget,
            journal,
            case=prepared.case.name,
            replay=_replayed(journal.trials()),
            before=[trial for trial in first if trial.ok and not prepared.corrects(trial.placement)],
            given=_given(prepared),
            watch=steps.watch,
        )
        yield Tuning(
            prepared=prepared,
            resources=resources,
            strategy=name or rules.strategy,
            make=make,
            constraint=constraint,
            folder=folder,
            bench=bench,
            oracle=oracle,
            search=search,
            steps=steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A search that `open_tuning` has prepared: run ``search`` whole or step by step, then `repair`, then `confirm`.

    ``strategy`` is the name of the strategy that ``make`` makes; candidates are written to ``folder``.
    """

    prepared: Prepared
    resources: Resources
    strategy: str
    make: MakeStrategy
    constraint: AccuracyConstraint
    folder: Path
    bench: Bench
    oracle: RehearsalOracle | None
    search: Search
    steps: TimedSteps

    def repair(self) -> None:
        """Race the fastest candidates that just missed the SQNR limit, without their noisiest units.

        Only if nothing has won, or only a much slower candidate. With a time limit this may take
        `OVERTIME_SHARE` of it in addition.
        """
        rules, near_miss, oracle = self.prepared.case.tune, near_miss_of(self.constraint), self.oracle
        if near_miss is None or oracle is None or rules.objective == "pareto":
            return
        if self.resources.seconds_left() == 0:
            return
        self.steps.begin_overtime(
            SECONDS[rules.preset] if rules.minutes is None else OVERTIME_SHARE * 60 * rules.minutes
        )
        for placement in repaired(self.search.trials, near_miss, oracle, self.prepared.space):
            trial = self.search.evaluate_also(Proposal(placement=placement, phase="repair"))
            oracle.learn(trial)
            if trial.incumbent or self.steps.overtime_left == 0:
                return

    def confirm(self) -> Tuned:
        """Rebuild the finalists, time them together, and select the final model."""
        prepared, trials = self.prepared, tuple(self.search.trials)
        self.steps.end()
        self.steps.report("confirming")
        confirmed = confirm(
            trials,
            prepared.space.resolve(prepared.space.everything()),
            self.bench,
            self.constraint,
            pareto=prepared.case.tune.objective == "pareto",
            beside=other_references(prepared, self.folder),
            has_time=self._has_time,
            has_spare=partial(self._has_spare, time.monotonic()),
        )
        note_float_types(prepared, confirmed.latency)
        confirmed = self._with_profiles(confirmed)
        winner = next(trial.placement for role, trial in confirmed.lines if role == "winner")
        self._note_given(confirmed)
        return Tuned(
            result=self._result(confirmed),
            latency=confirmed.latency,
            raw_winner=raw_winner(trials) or winner,
            confirmed=confirmed.lines,
        )

    def _note_given(self, confirmed: Confirmed) -> None:
        """Note the time and the SQNR of the model as given, if it is quantized."""
        trial = next((trial for trial in confirmed.trials if trial.placement.given), None)
        if trial is None:
            return
        if not trial.ok:
            self.prepared.note_once(f"the model as given did not run: {trial.error}")
            return
        role = "tuned" if confirmed.choice.placement.given else GIVEN
        ratio, sqnr_db = confirmed.latency.ratios.get(role), self.constraint.sqnr_db(trial)
        took = ratio_text(trial.ratio or 1.0 if ratio is None else ratio.median)
        took += "" if ratio is None else f" (95 %: {interval_text(ratio)})"
        error = "" if sqnr_db is None else f", with {sqnr_db:.1f} dB"
        missed = "" if self.constraint.reaches(trial) else ", which misses the limits"
        selected = "; it is selected" if confirmed.choice.placement.given else ""
        self.prepared.note_once(
            f"the given model's own placement takes {took} of the time of its float form{error}{missed}{selected}"
        )

    @property
    def _cut_short(self) -> str:
        """The steps that the search did not reach, if a limit ended it."""
        rules, space = self.prepared.case.tune, self.prepared.space
        return cut_short_text(
            self.search.ended_by,
            self.search.trials,
            rules,
            usual=trials_of(replace(rules, minutes=None), space, self.make),
            steps=getattr(self.make, "steps", {}),
            untried=self.prepared.corrections.untried,
        )

    @property
    def _ended(self) -> str:
        """The reason why a search ended, if no limit ended it and its strategy estimates the gain of a build."""
        least_gain = self.search.least_gain
        if self.search.ended_by or not least_gain:
            return ""
        built = count_text(candidates_of(self.search.trials), "build")
        return (
            f"the search ended after {built}: less than {least_gain:.0%} of the time is expected of another"
        )

    def _with_profiles(self, confirmed: Confirmed) -> Confirmed:
        """The same with layer times of the selected model, or of the best candidates if the reference is selected.

        They are taken now if no trial has any. Without time for a build, or if they cannot be taken, there are none.
        """
        choice, trials = confirmed.choice, [*confirmed.trials, *(trial for _, trial in confirmed.lines)]
        names = [choice.placement.digest]
        if choice.unchanged:
            names = [one.placement for one in self._rejected(confirmed)[:2]]
        taken: dict[str, tuple[LayerTime, ...]] = {}
        for digest in names:
            built = [t for t in trials if t.ok and t.placement.digest == digest and not t.subgraph]
            has_time = self.resources.seconds_left() != 0 and self._has_time(self._build_seconds)
            if not built or any(trial.layers for trial in built) or not has_time:
                continue
            self.steps.report("timing the layers of a candidate")
            with suppress(BackendError):
                taken[digest] = self.bench.layers_of(built[0].placement)

        def profiled(trial: Trial) -> Trial:
            layers = None if trial.subgraph or not trial.ok else taken.get(trial.placement.digest)
            return trial if layers is None else replace(trial, layers=layers)

        trials, lines = list(map(profiled, confirmed.trials)), [(r, profiled(t)) for r, t in confirmed.lines]
        for digest in taken:
            line = next((trial for _, trial in lines if trial.placement.digest == digest), None)
            trial = next((trial for trial in trials if trial.placement.digest == digest), None)
            if trial is None and line is not None:  # everything quantized, which the search did not build
                trials.append(line)
            elif line is None and trial is not None:  # the journal has the trial without layers
                number = len(confirmed.trials) + len(lines)
                lines.append(("profiled", replace(trial, number=number, phase="confirm", incumbent=False)))
        return replace(confirmed, trials=tuple(trials), lines=tuple(lines))

    def _rejected(self, confirmed: Confirmed) -> tuple[RejectedCandidate, ...]:
        """The candidates to compare with the reference, if that is selected."""
        if not confirmed.choice.unchanged:
            return ()
        ops = {node.name: node.op_type for node in self.prepared.model.nodes}
        plain = confirmed.latency.ratios.get(FLOAT32)
        known = known_candidates(
            confirmed.trials,
            dict(confirmed.lines),
            confirmed.ratios,
            self.constraint,
            scale=1.0 if plain is None else plain.median,
        )
        # the profile of a converted model is not that of the reference
        layers = confirmed.trials[0].layers if plain is None else ()
        return rejected_candidates(known, layers, self.constraint, ops)

    @property
    def _build_seconds(self) -> float:
        return self.search.trials[0].build_seconds

    def _has_time(self, seconds: float) -> bool:
        """Whether one more measurement ends before twice the search's time limit."""
        minutes = self.prepared.case.tune.minutes
        return minutes is None or self.search.spent_seconds + seconds <= 2 * 60 * minutes

    def _has_spare(self, started: float, seconds: float) -> bool:
        """Whether one more measurement ends within the time limit; without one, soon after the confirmation started."""
        rules = self.prepared.case.tune
        if rules.minutes is None:
            return time.monotonic() - started + seconds <= SECONDS[rules.preset]
        return self.search.spent_seconds + seconds <= 60 * rules.minutes

    def _result(self, confirmed: Confirmed) -> SearchResult:
        prepared, choice = self.prepared, confirmed.choice
        errors, errors_missing = self._block_errors()
        seconds, rejected, cut_short = self.steps.total_seconds, self._rejected(confirmed), self._cut_short
        reasons = (choice.reason, why_text(rejected), self._rehearsed(choice), cut_short or self._ended)
        return SearchResult(
            winner=choice.placement,
            trials=confirmed.trials,
            unchanged=choice.unchanged,
            reason=prepared.nothing or "; ".join(filter(None, reasons)),
            strategy=self.strategy,
            seconds=seconds,
            cpu_seconds=self.steps.cpu_seconds,
            eps=self.bench.eps,
            blocks=len(prepared.space.units),
            regions=len(prepared.regions),
            patterns=len({region.pattern for region in prepared.regions}),
            float_runs=1e3 * seconds / confirmed.latency.samples["reference"].median_ms("wall"),
            ended_by=self.search.ended_by,
            cut_short=cut_short,
            ended=self._ended,
            rejected=rejected,
            front=confirmed.front,
            accuracy=self.constraint.bound(choice.placement),
            limits=self.constraint.limits,
            errors=errors,
            errors_missing=errors_missing,
            corrections=prepared.corrections.gains,
            converted_from=FLOAT16 if prepared.is_converted else "",
        )

    def _block_errors(self) -> tuple[tuple[BlockError, ...], str]:
        """The error of each block alone, or why it is missing; measured now if the search did not need it.

        The time is limited by a share of the search's, by the preset, and by the search's own limit.
        """
        if self.oracle is None:
            if not self.prepared.space.units:
                return (), "no block can be quantized"
            if self.constraint.admission is None:
                return (), "the search had neither an accuracy constraint nor accuracy as an objective"
            return (), "the device is simulated"
        self.steps.report("measuring the error of each block")
        rules, spent = self.prepared.case.tune, self.steps.total_seconds
        left = [ERRORS_SHARE * spent, SECONDS[rules.preset], self.resources.seconds_left()]
        if rules.minutes is not None:
            left.append(60 * rules.minutes - spent)
        return self.oracle.block_errors(min(seconds for seconds in left if seconds is not None))

    def _rehearsed(self, choice: Selection) -> str:
        """The rehearsed figures for the reason of a choice."""
        least = self.constraint.min_sqnr_db
        if self.oracle is None:
            return ""
        if choice.unchanged:
            return self.oracle.refused_text(least)
        return "" if least is None or choice.placement.given else self.oracle.text(choice.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of a search: its result, the confirming measurement if it times, and the winner before it.

    ``confirmed`` are the finalists' lines for the journal, by role.
    """

    result: SearchResult
    latency: LatencyEvidence | None
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]

    @property
    def intervals(self) -> dict[str, Interval]:
        """Confirmed ratios to the reference, by digest of the placement; empty without timing."""
        if self.latency is None:
            return {}
        ratios = self.latency.ratios
        found = {trial.placement.digest: ratios[role] for role, trial in self.confirmed if role in ratios}
        return {**found, self.result.winner.digest: ratios["tuned"]}


class TimedSteps:
    """Reports the steps of a search with the time that is left for them, and measures how long the search takes.

    The time limit is ``minutes`` from `begin` to `end`, without the time spent waiting for other runs. Candidates after
    the search have the time of `begin_overtime` instead.
    """

    def __init__(self, resources: Resources, minutes: float | None) -> None:
        self._resources, self._minutes = resources, minutes
        self._started = time.monotonic(), time.process_time()
        self._began: float | None = None
        self._overtime_ends: float | None = None

    def begin(self) -> None:
        """Begin the time limit."""
        self._began = time.monotonic() - self._resources.waited()

    def begin_overtime(self, seconds: float) -> None:
        """Begin the time for candidates after the search."""
        self._overtime_ends = time.monotonic() + seconds

    def end(self) -> None:
        """End the time for candidates; steps after it have no limit."""
        self._began = None

    @property
    def total_seconds(self) -> float:
        """Seconds since the first step, including those spent waiting."""
        return time.monotonic() - self._started[0]

    @property
    def cpu_seconds(self) -> float:
        """Seconds of CPU time of this process since the first step."""
        return time.process_time() - self._started[1]

    @property
    def used_seconds(self) -> float:
        """Seconds since the time limit began, without those spent waiting for other runs."""
        return 0.0 if self._began is None else time.monotonic() - self._resources.waited() - self._began

    @property
    def overtime_left(self) -> float | None:
        """Seconds left of the overtime; ``None`` before it."""
        return None if self._overtime_ends is None else max(0.0, self._overtime_ends - time.monotonic())

    def report(self, text: str) -> None:
        """Report the beginning of a step, with the time left of the limit while it runs."""
        is_limited = self._minutes is not None and self._began is not None
        left = max(0.0, 60 * (self._minutes or 0.0) - self.used_seconds) if is_limited else None
        case = self._resources.case
        self.watch(Progress(case=case, phase="", done=0, total=0, doing=text, seconds_left=left))

    def report_builds(self, text: str) -> None:
        """Report a step of a measurement of fresh builds: of noise during the search, of finalists after it."""
        self.report(f"confirming: {text}" if self._began is None else f"measuring the noise: {text}")

    def watch(self, progress: Progress) -> None:
        """Report progress; during the overtime with the time left of that."""
        if self._resources.watch is None:
            return
        if self.overtime_left is not None and progress.seconds_left is not None:
            progress = replace(progress, seconds_left=self.overtime_left)
        self._resources.watch(progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A prepared case on its device with its constraints, of which a search makes its bench, oracle and strategy."""

    prepared: Prepared
    resources: Resources
    constraint: AccuracyConstraint

    @property
    def computes(self) -> bool:
        """Whether the device computes outputs; a simulated one does not."""
        return self.resources.backend.capabilities(self.resources.options).computes

    def uncorrected(self) -> _Problem:
        """The same without corrections, of which nothing is measured yet."""
        constraint = self.constraint.for_other_numbers()
        if constraint.admission is not None:
            # a resumed search does not repeat the rehearsals of the first placement
            constraint.admission.difference = AllDataDifference()
        return replace(self, prepared=self.prepared.uncorrected(), constraint=constraint)

    def bench(
        self,
        folder: Path,
        random: np.random.Generator,
        report: Callable[[str], None] = lambda _: None,
        *,
        looks: bool = False,
    ) -> Bench:
        """A bench that writes candidates to ``folder``. With ``looks`` its intervals include their variation."""
        prepared, resources = self.prepared, self.resources
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
            looks=Looks(clock=clock, random=random) if looks and self.computes else None,
            admission=self.constraint.admission,
            extract=PartFiles(prepared, folder, store),
            folder=folder,
            jobs=resources.jobs,
            engines=resources.engines,
            report=report,
        )

    def oracle(self, opened: ExitStack, left: SecondsLeft) -> RehearsalOracle | None:
        """The oracle of a search with accuracy constraints or objective; ``None`` on a simulated device.

        ``left`` gives the seconds that the search has left to choose and build candidates.
        """
        prepared, constraint = self.prepared, self.constraint
        if constraint.admission is None or not prepared.space.units or not self.computes:
            return None
        rehearser = opened.enter_context(Rehearser(prepared, self.resources, prepared.comparison_data()))
        metric = None
        if constraint.rules is not None and constraint.min_accuracy is not None:
            reference = constraint.score(NO_PLACEMENT)
            assert reference is not None  # it was computed for the limit
            metric = RehearsedMetric(
                prepared.scores, constraint.rules, reference, constraint.min_accuracy, left
            )
        # of the rehearsal, the task metric needs the float outputs too
        shares = metric is None and is_arithmetic(self.resources.backend)
        return RehearsalOracle(
            rehearser,
            prepared.space,
            prepared.note_once,
            left,
            metric,
            constraint.min_sqnr_db,
            constraint.admission.difference,
            constraint.admission.all_data if shares else None,
        )

    def setup(
        self, clock: Clock, trials: int, oracle: RehearsalOracle | None, starts: Sequence[Placement]
    ) -> SearchSetup:
        """The setup of a strategy, which starts from these placements."""
        rules = self.prepared.case.tune
        return SearchSetup(
            space=self.prepared.space,
            clock=clock,
            preset=rules.preset,
            trials=trials,
            trials_per_region=rules.trials_per_region,
            validate_groups=rules.validate_groups,
            seeds=tuple(dict.fromkeys(placement for placement in starts if placement.sites)),
            min_sqnr_db=self.constraint.min_sqnr_db,
            min_accuracy=self.constraint.min_accuracy,
            pareto=rules.objective == "pareto",
            fused=self.prepared.fused,
            accuracy=oracle,
        )


@dataclass(frozen=True, slots=True)
class _First:
    """The trials before corrections, with what they show of the limits.

    No placement within the limits quantizes the units in ``excluded``. ``is_limited`` is false if everything quantized
    is expected to meet the limits by a margin.
    """

    trials: list[Trial]
    excluded: frozenset[str] = frozenset()
    is_limited: bool = True

    @property
    def won(self) -> list[Placement]:
        """The placements that won their races."""
        return [trial.placement for trial in self.trials if trial.incumbent]


def _find_corrections(
    problem: _Problem,
    journal: BuildLogs,
    random: np.random.Generator,
    starts: Sequence[Placement],
    trials: int,
    steps: TimedSteps,
) -> tuple[list[Trial], list[Placement]]:
    """Find the corrections of the case, judged also at a placement that meets the limits without them.

    None are sought if no limit is near: everything quantized is expected to meet it by a margin, and corrections save
    no time.

    Returns the trials that were made for that, and the placements among them which the search begins with.
    """
    first = _first_trials(problem, journal, random, starts, trials, steps)
    prepared, near = problem.prepared, promising(first.trials, problem.constraint)
    minutes = prepared.case.tune.minutes
    if not first.is_limited and prepared.case.quantize.corrections == "auto":
        prepared.seek_no_corrections()
        return first.trials, first.won
    prepared.judge_corrections_at(near, first.excluded)
    share = "" if minutes is None else f", up to {SHARE:.0%} of the search's time"
    steps.report(f"looking for corrections{share}")
    are_taken = any(gain.taken for gain in prepared.corrections.gains)
    won = first.won
    has_begun = _has_begun(journal.trials())
    if are_taken and won and not has_begun and not _keeps_metric(problem, won[-1], random):
        prepared.drop_corrections()
        prepared.note_once(
            "no corrections are applied: with them, the first placement that met the limit on the metric misses it"
        )
        are_taken = False
    return first.trials, list(dict.fromkeys([*won, near] if near is not None and are_taken else won))


def _keeps_metric(problem: _Problem, placement: Placement, random: np.random.Generator) -> bool:
    """Whether a placement meets the limit on the task metric with corrections, as it does without.

    Figures of one that does not are dropped again.
    """
    constraint = problem.constraint
    if constraint.admission is None or constraint.min_accuracy is None:
        return True
    if not problem.prepared.corrects(placement):
        return True
    with TemporaryFolder() as folder, closing(problem.bench(folder, random)) as bench:
        try:
            keeps = bench.admits(placement)
        except QdqspecError:
            return True  # the search finds the same failure, and records it
    if not keeps:
        constraint.admission.remove(placement)
    return keeps


def _first_trials(
    problem: _Problem,
    journal: BuildLogs,
    random: np.random.Generator,
    starts: Sequence[Placement],
    trials: int,
    steps: TimedSteps,
) -> _First:
    """Trials of the first placements that are expected to meet the limits, before corrections take their time.

    They have no corrections, which are judged on the last of them. The search begins with the one that won, and builds
    it again only if corrections change its model. A resumed search has those of its journal.
    """
    prepared, resources, known = problem.prepared, problem.resources, journal.trials()
    rules = prepared.case.tune
    if _has_begun(known) or rules.objective == "pareto" or not prepared.may_correct:
        return _First([trial for trial in known if trial.phase == FIRST])
    plain = problem.uncorrected()
    with ExitStack() as opened:
        folder = opened.enter_context(TemporaryFolder())
        bench = opened.enter_context(closing(plain.bench(folder, random)))
        budget = Budget(
            trials=trials,
            seconds=SECONDS[rules.preset] if rules.minutes is None else 60 * FIRST_SHARE * rules.minutes,
            waited=resources.waited,
            run_left=resources.seconds_left,
            late=1,
        )
        oracle = plain.oracle(opened, lambda: budget.left)
        if oracle is None:
            return _First([])
        strategy = FirstPlacement(plain.setup(bench.clock, trials, oracle, starts))
        search = Search(
            strategy,
            bench,
            budget,
            journal,
            case=prepared.case.name,
            replay=known,
            watch=lambda progress: (
                steps.report(f"{progress.doing} for a first placement") if progress.doing else None
            ),
        )
        found = [trial for trial in search.run() if trial.phase == FIRST]
        is_limited = strategy.is_limited or not strategy.everything_keeps_metric
        return _First(found, strategy.excluded, is_limited)


def _replayed(known: Sequence[Trial]) -> list[Trial]:
    """The trials of a journal that a search itself continues from.

    What the search for a first placement found of the variation between builds, in little time, is left out before the
    search begins unless it has as many builds as others.
    """
    has_begun = _has_begun(known)
    return [
        trial
        for trial in known
        if trial.phase != FIRST
        and (trial.phase != "noise" or has_begun or len(trial.samples.wall_ms) >= NOISE_BUILDS * FEW_ROUNDS)
    ]


def near_miss_of(constraint: AccuracyConstraint) -> NearMiss | None:
    """Which trials just missed the SQNR limit; ``None`` without a limit."""
    least, gain = constraint.min_sqnr_db, constraint.limits.min_gain
    return None if least is None else NearMiss(sqnr_db=constraint.sqnr_db, least_db=least, min_gain=gain)


def promising(trials: Sequence[Trial], constraint: AccuracyConstraint) -> Placement | None:
    """The placement that corrections must not harm: the last winner, or a much faster one that just missed the limit.

    Without either, the last that was built; ``None`` if none was.
    """
    built = [trial for trial in trials if trial.ok]
    won = [trial for trial in built if trial.incumbent]
    near_miss = near_miss_of(constraint)
    near = near_miss.of(built) if near_miss else []
    best = next(iter((*near, *reversed(won), *reversed(built))), None)
    return None if best is None else best.placement


def _has_begun(trials: Iterable[Trial]) -> bool:
    """Whether a journal has trials of a search itself: of more than the reference and the steps before corrections."""
    return any(trial.number and trial.phase not in (FIRST, "noise") for trial in trials)


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
