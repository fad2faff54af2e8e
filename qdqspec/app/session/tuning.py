"""The search of one case: opened by all steps before its first build, run, confirmed and described."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from qdqspec._core.arrays import Feed
from qdqspec._core.files import Closing, TemporaryFolder
from qdqspec._core.progress import Deadline
from qdqspec._core.registry import resolve
from qdqspec._core.units import count_text, interval_text, names_text, ratio_text
from qdqspec.accuracy import Dataset, Rehearsal, RehearsalOracle, RehearsedMetric, Rehearser
from qdqspec.app.evidence.builds import rejected_candidates
from qdqspec.app.evidence.timing import clock_for, note_float_types
from qdqspec.app.preparation.files import CandidateFiles, half_reference
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import reference_runtime
from qdqspec.app.preparation.start import warm_starts
from qdqspec.app.preparation.stored import LoggedJournal
from qdqspec.backends import engines_at_once
from qdqspec.checks import why_text
from qdqspec.errors import BackendError, PlacementError
from qdqspec.graph import require_path
from qdqspec.qdq import SchemeSpace
from qdqspec.search import (
    Confirmed,
    Contest,
    Limits,
    Proposal,
    Search,
    SearchSetup,
    Strategy,
    confirm,
    most_builds,
)
from qdqspec.timing import Bench, preload_scipy
from qdqspec.types import (
    GIVEN,
    TIMED_TRIALS,
    TRIALS,
    BlockError,
    Interval,
    LatencyEvidence,
    Placement,
    RejectedCandidate,
    SearchResult,
    Site,
    Trial,
    TuneRules,
)

MakeStrategy: TypeAlias = Callable[[SearchSetup, np.random.Generator], Strategy]
AnyStrategy: TypeAlias = str | Strategy | MakeStrategy


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


class CaseSearch(Closing):
    """The search of a case, whether it times candidates or not, opened by the steps before its first build.

    These are calibration, the score of the reference, which limits refer to, corrections, and the rehearsal of
    placements: ``oracle`` is ``None`` if accuracy is not measured, or the device simulated. Its processes stop when it
    is closed.
    """

    def __init__(self, prepared: Prepared, journal: LoggedJournal, started: tuple[float, float]) -> None:
        """The search ``started`` at these readings of the clock and of the processor time."""
        rules, resources = prepared.case.tune, prepared.resources
        self.prepared, self.journal, self.started = prepared, journal, started
        _ = prepared.space  # first: a model that cannot be calibrated is refused as such
        data, expected, note = prepared.data.for_comparison, prepared.build_expected, prepared.warnings.append
        self.limits = Limits.of(rules, prepared.scores, data, expected, note)
        self.deadline = Deadline(
            seconds=None if rules.minutes is None else 60 * rules.minutes,
            waited=lambda: sum(resources.waits),
            run_left=resources.seconds_left,
        )
        resources.report_step("looking for corrections")
        _ = prepared.corrections  # before the first build: all candidates have the same numbers
        with ExitStack() as opened:
            self.folder = opened.enter_context(TemporaryFolder())
            self.files = CandidateFiles(prepared, self.folder)
            self.oracle = self._open_oracle(opened)
            self._opened = opened.pop_all()

    def _open_oracle(self, opened: ExitStack) -> RehearsalOracle | None:
        prepared, limits = self.prepared, self.limits
        if not limits.are_measured or not prepared.space.units or not prepared.capabilities.computes:
            return None
        metric = None
        if (least := limits.metric) is not None:
            metric = RehearsedMetric(prepared.scores, least.rules, least.reference)
        return RehearsalOracle(
            opened.enter_context(rehearser_of(prepared, prepared.data.for_comparison())),
            prepared.note_once,
            lambda: self.deadline.left,
            metric=metric,
            least_db=limits.min_sqnr_db,
            difference=limits.difference,
        )

    def given_candidate(self) -> Proposal | None:
        """The model as given as a candidate, if it is quantized and the spec excludes nothing of what it quantizes."""
        prepared = self.prepared
        if prepared.quantized is None:
            return None
        placement = Placement(sites=prepared.quantized.imported.placement.sites, given=True)
        try:
            return Proposal(placement=prepared.space.permitted(placement), phase=GIVEN, profile=True)
        except PlacementError as error:
            prepared.note_once(f"the model as given is no candidate: {error.what}")
            return None

    def result(self, **found: Any) -> SearchResult:
        """The result of a search that ends now: what a search of any kind found, and the figures of its case."""
        prepared, (seconds, cpu_seconds) = self.prepared, self.started
        return SearchResult(
            seconds=time.monotonic() - seconds,
            cpu_seconds=time.process_time() - cpu_seconds,
            blocks=len(prepared.space.units),
            regions=len(prepared.regions),
            patterns=len({region.pattern for region in prepared.regions}),
            limits=prepared.case.tune.limits,
            corrections=prepared.corrections.gains,
            converted_from=prepared.converted_from,
            **found,
        )

    def close(self) -> None:
        """Stop the processes of the search."""
        self._opened.close()


class Tuning(CaseSearch):
    """The search of a case that times candidates. It resumes where ``journal`` ends.

    ``strategy`` replaces the one of the case, see `strategy_of`. `run` is the whole search; a caller may also run
    ``search`` step by step, and then `finish`.
    """

    def __init__(
        self, prepared: Prepared, journal: LoggedJournal, strategy: AnyStrategy | None = None
    ) -> None:
        started = time.monotonic(), time.process_time()
        rules, resources = prepared.case.tune, prepared.resources
        self.make, self.strategy = strategy_of(prepared, strategy)
        # Separate generators, so that a resumed run, which measures less, asks for the same placements.
        for_strategy, for_bench = np.random.default_rng(resources.settings.seed).spawn(2)
        preload_scipy()
        resources.report_step("calibrating")
        trials = trials_of(rules, prepared.space, self.make)
        resources.report_step("running the reference")
        super().__init__(prepared, journal, started)
        with ExitStack() as unless_opened:
            unless_opened.callback(self.close)
            on_cores, deadline = prepared.capabilities.hardware == "cpu", self.deadline
            bench = Bench(
                resources.backend,
                self.files.whole,
                prepared.loads,
                clock=clock_for(rules, prepared.settings.threads),
                random=for_bench,
                options=resources.options,
                exclusive=resources.exclusive,
                # the states of a simulated device would last no time
                looks=prepared.capabilities.computes,
                extract=self.files.part,
                folder=self.folder,
                jobs=resources.jobs,
                engines=engines_at_once(resources.options.threads) if on_cores else 1,
                report=lambda text: resources.report_step(f"timing fresh builds: {text}", deadline.left),
            )
            self.bench = self._opened.enter_context(closing(bench))
            setup = SearchSetup(
                space=prepared.space,
                preset=rules.preset,
                trials=trials,
                trials_per_region=rules.trials_per_region,
                validate_groups=rules.validate_groups,
                seeds=tuple(dict.fromkeys(start for start in warm_starts(prepared) if start.sites)),
                limits=self.limits,
                pareto=rules.objective == "pareto",
                fused=prepared.fused,
                accuracy=self.oracle,
            )
            confirming, _ = most_builds(given=prepared.quantized is not None)
            self.search = Search(
                self.make(setup, for_strategy),
                Contest(self.bench, self.limits),
                deadline,
                journal,
                case=prepared.case.name,
                most_trials=trials,
                confirming=confirming,
                replay=journal.trials(),
                given=self.given_candidate(),
                watch=resources.watch,
            )
            unless_opened.pop_all()

    def run(self) -> Tuned:
        """Propose, rehearse, build and race; each trial is in the journal before the next one begins. Then `finish`."""
        self.search.run()
        return self.finish()

    def finish(self) -> Tuned:
        """Rebuild the finalists of a search, time them together, select the final model, and describe the result."""
        prepared = self.prepared
        prepared.resources.report_step("confirming")
        beside = half_reference(prepared, self.folder)
        if prepared.converted_from:  # the placements are of the model in float32
            beside["reference"] = require_path(prepared.given)
        confirmed = confirm(
            tuple(self.search.trials),
            prepared.space.resolve(prepared.space.everything()),
            self.bench,
            self.limits,
            self.deadline,
            pareto=prepared.case.tune.objective == "pareto",
            beside=beside,
        )
        note_float_types(prepared, confirmed.latency)
        confirmed = self._with_profiles(confirmed)
        self._note_given(confirmed)
        self._note_refused()
        return Tuned(
            result=self._result(confirmed),
            latency=confirmed.latency,
            raw_winner=confirmed.raw_winner,
            confirmed=confirmed.lines,
            intervals=confirmed.intervals,
        )

    def _result(self, confirmed: Confirmed, *, errors_share: float = 0.05) -> SearchResult:
        """The result of a search.

        The errors of single blocks that the search has not measured may take ``errors_share`` of the time that it took:
        with less they are of fewer samples, or missing, in the reports of more searches.
        """
        prepared, search, choice, oracle = self.prepared, self.search, confirmed.choice, self.oracle
        errors, missing = tuple[BlockError, ...](), "the device is simulated"
        if oracle is not None:
            prepared.resources.report_step("measuring the error of each block")
            seconds, left = errors_share * self.deadline.spent, self.deadline.left
            errors, missing = oracle.block_errors(seconds if left is None else min(seconds, left))
        elif not prepared.space.units:
            missing = "no block can be quantized"
        elif not self.limits.are_measured:
            missing = "the search had neither an accuracy constraint nor accuracy as an objective"
        rejected, ended, ended_by = self._rejected(confirmed), "", search.ended_by
        least_gain = getattr(search.strategy, "least_gain", None)
        if least_gain and not search.ended_by:  # the strategy estimates the gain of a build
            built = count_text(search.candidates, "build")
            least = f"{100 * least_gain:g} %"
            ended_by = f"expected gain below {least}"
            ended = f"the search ended after {built}: less than {least} of the time is expected of another"
        rules = prepared.case.tune
        usual = trials_of(replace(rules, minutes=None), prepared.space, self.make)
        cut_short = cut_short_text(search.ended_by, search.trials, rules, usual)
        refused = oracle.refused_text if oracle is not None and choice.unchanged else ""
        reasons = (choice.reason, why_text(rejected), refused, cut_short or ended)
        reference_ms = confirmed.latency.samples["reference"].median_ms("wall")
        return self.result(
            winner=choice.placement,
            trials=confirmed.trials,
            unchanged=choice.unchanged,
            reason=prepared.nothing or "; ".join(filter(None, reasons)),
            strategy=self.strategy,
            eps=search.contest.eps,
            float_runs=1e3 * (time.monotonic() - self.started[0]) / reference_ms,
            ended_by=ended_by,
            cut_short=cut_short,
            ended=ended,
            rejected=rejected,
            front=confirmed.front,
            accuracy=self.limits.bound(choice.placement),
            errors=errors,
            errors_missing=missing,
        )

    def _note_given(self, confirmed: Confirmed) -> None:
        """Note the time and the SQNR of the model as given, if it is quantized."""
        trial = next((trial for trial in confirmed.trials if trial.placement.given), None)
        if trial is None:
            return
        if not trial.ok:
            self.prepared.note_once(f"the model as given did not run: {trial.error}")
            return
        is_selected = confirmed.choice.placement.given
        ratio = confirmed.latency.ratios.get("tuned" if is_selected else GIVEN)
        sqnr_db = self.limits.figures(trial.placement).sqnr_db
        took = ratio_text(trial.ratio or 1.0 if ratio is None else ratio.median)
        took += "" if ratio is None else f" (95 %: {interval_text(ratio)})"
        error = "" if sqnr_db is None else f", with {sqnr_db:.1f} dB"
        missed = "" if self.limits.admits(trial.placement) else ", which misses the limits"
        self.prepared.note_once(
            f"the given model's own placement takes {took} of the time of its float form{error}{missed}"
            f"{'; it is selected' if is_selected else ''}"
        )

    def _note_refused(self) -> None:
        """Note the nodes with which no placement was built, with the error of the smallest one."""
        units: Sequence[str] = getattr(self.search.strategy, "refused", ())
        if units:
            failed = (trial for trial in self.search.trials if not trial.ok)
            error = min(failed, key=lambda trial: len(trial.placement.labels)).error
            self.prepared.note_once(
                f"nodes left in floating point, as no model with them quantized was built, {names_text(units)}: {error}"
            )

    def _with_profiles(self, confirmed: Confirmed) -> Confirmed:
        """The same with layer times, taken if there is time, of the selected model, or of the best if none is."""
        digests: Iterable[str] = [confirmed.choice.placement.digest]
        if confirmed.choice.unchanged:
            digests = [one.placement for one in self._rejected(confirmed)[:2]]
        deadline, trials, lines = self.deadline, [*confirmed.trials], [*confirmed.lines]
        for digest in digests:
            known = [*trials, *(trial for _, trial in lines)]
            built = [t for t in known if t.ok and t.placement.digest == digest and not t.subgraph]
            has_time = deadline.run_left() != 0 and deadline.allows(trials[0].build_seconds, times=2)
            if not built or any(trial.layers for trial in built) or not has_time:
                continue
            self.prepared.resources.report_step("timing the layers of a candidate")
            try:
                profiled = replace(built[0], layers=self.bench.layers_of(built[0].placement))
            except BackendError:
                continue
            is_searched = any(trial is built[0] for trial in trials)
            trials = [profiled if trial is built[0] else trial for trial in trials]
            lines = [(role, profiled if trial is built[0] else trial) for role, trial in lines]
            if is_searched:  # the journal has the trial without layers
                line = replace(profiled, number=len(trials) + len(lines), phase="confirm", incumbent=False)
                lines.append(("profiled", line))
            else:  # everything quantized, which the search did not build
                trials.append(profiled)
        return replace(confirmed, trials=tuple(trials), lines=tuple(lines))

    def _rejected(self, confirmed: Confirmed) -> tuple[RejectedCandidate, ...]:
        ops = {node.name: node.op_type for node in self.prepared.model.nodes}
        return rejected_candidates(confirmed, self.limits, ops)


def cut_short_text(ended_by: str, trials: Sequence[Trial], rules: TuneRules, usual: int) -> str:
    """A search that ended at a limit: the candidates built, and the option to raise; empty if no limit ended it.

    ``usual`` is the number of candidates without a time limit.
    """
    if not ended_by:
        return ""
    built = len({t.placement.digest for t in trials if t.is_candidate})
    of = f"{built} of about " if usual > built else ""
    if "run" in ended_by:
        option = "--qdq-time-limit"
    elif "build" in ended_by:
        option = f"--trials {2 * usual} (tune.trials)"
    else:  # 2 to 10 times the time, for the usual number of candidates
        minutes = (rules.minutes or 1.0) * min(max(2.0, usual / max(built, 1)), 10.0)
        shown = math.ceil(minutes) if minutes > 2 else math.ceil(2 * minutes) / 2
        option = f"--minutes {shown:g} (tune.minutes)"
    return (
        f"the search ended at {ended_by}, before it was done: {of}{count_text(max(built, usual), 'candidate')} built, "
        f"give it more with {option}"
    )


def rehearser_of(prepared: Prepared, data: tuple[Dataset | list[Feed], str]) -> Rehearser:
    """Rehearses placements of a case on data, given with its name."""
    feeds, kind = data

    def build(sites: Sequence[Site], opened: ExitStack) -> Rehearsal:
        return Rehearsal(
            prepared.model,
            sites,
            prepared.numbers,
            lambda: feeds,
            reference_runtime(opened, prepared.options, prepared.backend),
            data=kind,
            rounds_biases=prepared.capabilities.rounds_biases,
        )

    return Rehearser(prepared.space, feeds, build)


def strategy_of(prepared: Prepared, given: AnyStrategy | None = None) -> tuple[MakeStrategy, str]:
    """A callable that makes the strategy of a case, or another one, and its name.

    Raises `ConfigError` if there is none of that name, or it cannot search the placements of the case.
    """
    given = prepared.case.tune.strategy if given is None else given
    if isinstance(given, str):
        make, name = cast("MakeStrategy", resolve("strategy", given)), given
    elif isinstance(given, type) or not hasattr(given, "ask"):
        make, name = cast("MakeStrategy", given), getattr(given, "__qualname__", type(given).__qualname__)
    else:
        ready = cast("Strategy", given)
        make, name = (lambda *_: ready), type(given).__qualname__
    refuse: Callable[[SchemeSpace], None] | None = getattr(make, "refuse", None)
    if refuse is not None:
        refuse(prepared.candidates)
    return make, name


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
