"""The loop of a search: ask for proposals, build them, decide who wins, write the journal, pass on the trials.

The only loop for every strategy, in a test run, on the command line and in Python. `Contest` decides which candidate
wins, `Search.ended_by` why the search ended.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from qdqspec.backends.base import Engine
from qdqspec.deadline import Deadline
from qdqspec.errors import BackendError, PlacementError
from qdqspec.measurement.admission import Admission
from qdqspec.measurement.bench import FLOAT, FLOOR_EPS, Bench
from qdqspec.measurement.race import both_of, profiled, warmed
from qdqspec.search.base import Proposal, Strategy
from qdqspec.types import NOT_CANDIDATES, Placement, Progress, Race, Samples, Trial
from qdqspec.units import count_text

Watch = Callable[[Progress], None]
_Key: TypeAlias = tuple[str, tuple[str, ...]]

NOISE_SHARE = 0.05  # of the time limit, for the variation between builds
ESTIMATING = 3  # candidates from which the time of the others is estimated
PART_EPS = 0.01  # for parts: the measured noise is that of the whole model, and a part is ranked by its ratio

_REPEATS = ("noise", "confirm")  # rebuilds of placements, which no strategy asks for
OWN, COMMIT = "own", "commit"  # phases of proposals by the caller instead of the strategy


class TrialLog(Protocol):
    """Writes trials as they happen; they are read back to resume a run."""

    def append(self, trial: Trial) -> None:
        """Write one trial so that it survives a kill after this call."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """A built candidate, or the trial of a failed build. It must be measured once, or closed."""

    trial: Trial
    engine: Engine | None = None
    profile: bool = False
    timed: bool = True

    @property
    def ok(self) -> bool:
        """Whether there is an engine to measure."""
        return self.engine is not None

    def close(self) -> None:
        """Close the engine of a candidate that will not be measured."""
        if self.engine is not None:
            self.engine.close()


class Contest:
    """Decides which candidate is the best so far, the incumbent.

    A candidate wins if it was faster than the incumbent by ``eps`` in a race, was so again with both built anew, and
    meets the limits on all data (``admission``). A candidate below the limits on a few samples is not raced: its ratio
    is that of a few runs. A candidate with the same optimized graph as another one has its result.
    """

    def __init__(self, bench: Bench, admission: Admission | None = None) -> None:
        self.eps = FLOOR_EPS
        self.best: float | None = None  # the incumbent's time over the reference's
        self._bench = bench
        self._admission = admission
        self._incumbent = FLOAT
        self._reference_seconds = 0.0  # that its build took
        self._seen: dict[str, Trial] = {}  # by hash of the optimized graph

    def build(self, number: int, proposal: Proposal, phase: str) -> Built:
        """Build a proposal. The result must be measured or closed."""
        started = time.perf_counter()
        placement, subgraph = proposal.placement, proposal.subgraph
        blank = Trial(number=number, phase=phase, placement=placement, subgraph=subgraph)
        try:
            engine = self._bench.open(placement, subgraph)
        except (BackendError, PlacementError) as error:
            failed = replace(blank, status="failed", error=self._bench.reason(error))
            return Built(replace(failed, build_seconds=time.perf_counter() - started))
        seconds = time.perf_counter() - started
        trial = replace(blank, build_seconds=seconds, graph_hash=engine.graph_hash)
        return Built(trial, engine, profile=proposal.profile, timed=proposal.timed)

    def measure(self, built: Built) -> Trial:
        """The trial of a built candidate. Its engine is closed unless it won; a failure of the backend is a trial."""
        if built.engine is None:
            return built.trial
        try:
            with self._closed_unless_kept(built.engine):
                if built.trial.subgraph:
                    return self._of_part(built.trial, built.engine, profile=built.profile)
                trial = self._of_whole(built, built.engine)
            self._bench.look(self._reference_seconds)
        except BackendError as error:
            reason = self._bench.reason(error)
            return replace(built.trial, status="failed", error=reason, graph_hash="")
        return trial

    def recall(self, trial: Trial) -> None:
        """Restore a trial of an earlier run as if it had been measured now, without building anything."""
        if trial.ok and trial.ratio is not None and not trial.subgraph:
            self._seen.setdefault(trial.graph_hash, trial)
        if self._admission is not None:
            self._admission.recall(trial)
        if trial.incumbent:
            self._replace_incumbent(trial)

    def measure_noise(self, reference: Trial, seconds: float | None = None) -> Samples:
        """Set ``eps`` by the variation between builds; see `Bench.measure_noise`."""
        self.eps, samples = self._bench.measure_noise(reference, seconds)
        return samples

    def _of_whole(self, built: Built, engine: Engine) -> Trial:
        trial = built.trial
        if self._admission is not None:
            with self._bench.several(trial.placement, engine) as several:
                trial = self._admission.measured(trial, several)
        if not built.timed:
            return trial
        before = self._seen.get(trial.graph_hash) if trial.graph_hash and self.best is not None else None
        if before is not None:
            return _with_same_graph(trial, before)
        with self._bench.exclusive():
            trial, engine = self._timed(trial, engine, profile=built.profile)
        with self._closed_unless_kept(engine):
            if trial.incumbent and self._admission is not None:
                with self._bench.several(trial.placement, engine) as several:
                    trial = self._admission.scored(trial, several)
            if trial.incumbent:
                self._replace_incumbent(trial)
                self._bench.keep(trial.placement, engine)
        self._seen[trial.graph_hash] = trial
        return trial

    def _timed(self, trial: Trial, engine: Engine, *, profile: bool) -> tuple[Trial, Engine]:
        """The trial with its times, and the engine that was timed last.

        If layers cannot be timed a note has the reason, and the engine is built again.
        """
        bench, notes = self._bench, tuple[str, ...]()
        samples = warmed(engine, bench.clock)
        trial = replace(trial, samples=samples)
        if profile:
            try:
                trial = replace(trial, layers=profiled(engine, samples.median_ms(bench.clock)))
            except BackendError as error:
                engine.close()
                engine = bench.open(trial.placement)
                notes = (f"layers were not timed: {bench.reason(error)}",)
        with self._closed_on_error(engine):
            if notes:
                warmed(engine, bench.clock)
            if self.best is None:
                trial = replace(trial, incumbent=True, ratio=1.0)
            elif self._admission is not None and self._admission.is_too_noisy(trial):
                trial = replace(trial, ratio=self._screened(samples))
            else:
                trial, engine = self._raced(trial, engine)
        noted = replace(trial.samples, notes=(*trial.samples.notes, *notes))
        return replace(trial, samples=noted), engine

    def _screened(self, samples: Samples) -> float:
        """The ratio to the reference by a few runs: sufficient for learning, not for winning."""
        clock, rival = self._bench.clock, self._bench.kept(self._incumbent)
        theirs = rival.time(len(samples.wall_ms), warmup=1)
        return samples.median_ms(clock) / theirs.median_ms(clock) * (self.best or 1.0)

    def _raced(self, trial: Trial, engine: Engine) -> tuple[Trial, Engine]:
        """Race a challenger. A winner must win again, with both built anew, by what makes the mean gain significant.

        Two builds of one model differ by more than a race resolves: without the second race one in six challengers that
        were no faster won, with it one in twenty (simulated, 1.2 % between builds; docs/decisions/0038).
        """
        bench, placement = self._bench, trial.placement
        outcome, ours, theirs = bench.race(placement, engine, self._incumbent, self.eps)
        won = outcome.verdict == "faster"
        if won:
            bench.drop()
            engine.close()
            engine = bench.open(placement)
            with self._closed_on_error(engine):
                warmed(engine, bench.clock)
                enough = float(np.clip(1 - (1 - self.eps) ** 2 / outcome.ratio, FLOOR_EPS, self.eps))
                again, more, others = bench.race(placement, engine, self._incumbent, enough)
            ours, theirs = ours + more, theirs + others
            outcome = both_of(outcome, again, ours, theirs, bench.clock)
            won = outcome.verdict == "faster"
        ratio = outcome.ratio * (self.best or 1.0)
        return replace(trial, race=outcome, samples=ours, rival=theirs, ratio=ratio, incumbent=won), engine

    def _of_part(self, trial: Trial, engine: Engine, *, profile: bool) -> Trial:
        """The trial of a part of the model, raced against the same nodes in float; it never becomes the incumbent."""
        bench, placement, nodes = self._bench, trial.placement, trial.subgraph
        with bench.exclusive():
            screened = warmed(engine, bench.clock)
            if not placement.sites:
                bench.keep(placement, engine, nodes)
                trial = replace(trial, samples=screened, ratio=1.0)
            else:
                outcome, ours, theirs = bench.race(placement, engine, FLOAT, PART_EPS, nodes)
                trial = replace(trial, samples=ours, rival=theirs, race=outcome, ratio=outcome.ratio)
            layers = profiled(engine, screened.median_ms(bench.clock)) if profile else ()
        return replace(trial, layers=layers)

    def _replace_incumbent(self, trial: Trial) -> None:
        if self.best is None:
            self._reference_seconds = trial.build_seconds
        self._incumbent, self.best = trial.placement, trial.ratio or 1.0

    @contextmanager
    def _closed_unless_kept(self, engine: Engine) -> Iterator[None]:
        """Close the engine at the end, also on errors, unless it is kept open."""
        try:
            yield
        finally:
            if not self._bench.keeps(engine):
                engine.close()

    @contextmanager
    def _closed_on_error(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except BaseException:
            engine.close()
            raise


class Search:
    """A search in progress. Iterating runs it to its end; a caller may also run its steps one by one.

    A step is to ask, to evaluate a proposal, and to tell the strategy its trial. ``most_trials`` is the largest number
    of builds. ``replay`` are trials of an earlier run of the same search: while the strategy asks for the same
    placements in the same order, the recorded trials are used and nothing is built. The reference is always built
    first, whatever the strategy or the limits; then ``given``, a proposal that is not the strategy's, which does not
    receive its trial. ``confirming`` is the number of builds after the search: once a candidate has won, their time is
    reserved.
    """

    def __init__(
        self,
        strategy: Strategy,
        contest: Contest,
        deadline: Deadline,
        log: TrialLog,
        *,
        case: str,
        most_trials: int,
        confirming: int = 0,
        replay: Sequence[Trial] = (),
        given: Proposal | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.trials: list[Trial] = []
        self.deadline = deadline
        self.most_trials = most_trials
        self._confirming = confirming
        self._given = given
        self._strategy = strategy
        self._contest = contest
        self._log = log
        self._case = case
        self._watch = watch
        self._noise = next((t for t in reversed(replay) if t.phase == "noise"), None)
        self._recorded = deque(t for t in replay if t.phase not in _REPEATS and (t.ok or t.number > 0))
        self._held: list[Proposal] = []  # asked of the strategy and not yet returned
        self._awaited: set[_Key] = set()  # returned and not yet told

    def __iter__(self) -> Iterator[Trial]:
        while proposals := self.ask():
            trials = list(map(self.evaluate, proposals))
            self.tell(trials)
            yield from trials

    def run(self) -> tuple[Trial, ...]:
        """Run to the end."""
        for _ in self:
            pass
        return tuple(self.trials)

    @property
    def ended_by(self) -> str:
        """The limit that ended the search, as text; empty if its strategy was done, or more is allowed."""
        is_done = self._strategy.done() and not self._held
        return "" if is_done else self._limit

    @property
    def _limit(self) -> str:
        """The limit that is reached, as text; empty if another build is allowed."""
        if candidates_of(self.trials) >= self.most_trials:
            return f"its limit of {count_text(self.most_trials, 'build')}"
        return self.deadline.reached

    @property
    def least_gain(self) -> float | None:
        """The share of the time that the strategy must expect of a build; ``None`` if it estimates nothing."""
        return getattr(self._strategy, "least_gain", None)

    @property
    def eps(self) -> float:
        """The smallest share of time that counts, by the variation between builds."""
        return self._contest.eps

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """At most ``n`` proposals; empty when the strategy has no more or a limit is reached."""
        if self.trials and self._given is not None:
            given, self._given = self._given, None
            self.evaluate_also(given)
        if self.trials and self._limit:
            return ()
        self._report("choosing candidates")
        proposals = self._held[:n] or self._strategy.ask(n)
        self._held = self._held[n:]
        self._awaited.update(map(_key, proposals))
        return proposals

    def evaluate(self, proposal: Proposal) -> Trial:
        """The trial of a proposal: recorded by an earlier run, else built and raced now, and written to the journal.

        A known placement is not built again. Raises `BackendError` if the reference itself does not run.
        """
        self._begin(proposal)
        return self._known(proposal) or self._recall(proposal) or self.measure(self.build(proposal))

    def evaluate_also(self, proposal: Proposal) -> Trial:
        """The trial of a proposal that is not the strategy's, which it does not receive, under the proposal's phase."""
        self._awaited.add(_key(proposal))
        try:
            return self.evaluate(proposal)
        finally:
            self._awaited.discard(_key(proposal))

    def build(self, proposal: Proposal) -> Built:
        """Only build a proposal; `measure` makes a trial of it."""
        self._begin(proposal)
        self._report(f"building {self._next_text}")
        return self._contest.build(len(self.trials), proposal, self._phase(proposal))

    def measure(self, built: Built) -> Trial:
        """Race a built candidate, and write its trial to the journal."""
        self._report(f"timing {self._next_text}")
        return self._journalled(replace(self._contest.measure(built), number=len(self.trials)))

    def tell(self, trials: Sequence[Trial]) -> None:
        """Pass the trials of the strategy's proposals to it; others are not passed."""
        answers = [trial for trial in trials if _key(trial) in self._awaited]
        self._awaited.difference_update(map(_key, answers))
        self._strategy.tell(answers)

    def commit(self, placement: Placement) -> Trial:
        """Make a placement the incumbent, whatever its race results. Raises `BackendError` if it fails."""
        known = self.evaluate(Proposal(placement=placement, phase=OWN))
        if not known.ok:
            raise BackendError(f"the placement cannot be the one to beat: {known.error}")
        trial = replace(known, number=len(self.trials), phase=COMMIT, incumbent=True, race=None, layers=())
        self._contest.recall(trial)
        return self._journalled(trial)

    def resume(self) -> None:
        """Restore all trials of the earlier run at once, in whatever order they were requested.

        The strategy receives those it asks for; its first new proposal waits for `ask`.
        """
        known: dict[_Key, Trial] = {}
        while self._recorded:
            trial = self._recorded.popleft()
            self._contest.recall(trial)
            trial = self._enter(trial)
            if trial.phase != COMMIT:
                known[_key(trial)] = trial
        while not self._held and (proposals := self._strategy.ask(1)):
            answer = known.pop(_key(proposals[0]), None)
            if answer is None:
                self._held = list(proposals)
            else:
                self._strategy.tell([answer])

    def _report(self, doing: str = "") -> None:
        """Report the progress at the beginning of a step, or after a new trial."""
        if self._watch is None:
            return
        trials, done = self.trials, candidates_of(self.trials)
        limits = [self.deadline.left]
        if done >= ESTIMATING:
            limits.append(self.deadline.spent / len(trials) * (self.most_trials - done))
        left = [max(0.0, seconds) for seconds in limits if seconds is not None]
        raced = [(trial, trial.race.verdict) for trial in trials if trial.race and not trial.subgraph]
        verdicts = [  # a faster one that was not accurate enough counts as slower
            "slower" if verdict == "faster" and not trial.incumbent else verdict for trial, verdict in raced
        ]
        self._watch(
            Progress(
                case=self._case,
                phase=trials[-1].phase if trials else "",
                done=done,
                total=self.most_trials,
                best=self._contest.best,
                kept=verdicts.count("faster"),
                dropped=verdicts.count("slower"),
                undecided=verdicts.count("no difference") + verdicts.count("same graph"),
                failed=sum(not t.ok for t in trials),
                seconds=self.deadline.spent,
                seconds_left=min(left, default=None),
                doing=doing,
            )
        )

    @property
    def _next_text(self) -> str:
        return f"candidate {len(self.trials)}" if self.trials else "the reference"

    def _begin(self, proposal: Proposal) -> None:
        if not self.trials and (proposal.placement.sites or proposal.subgraph):
            self.evaluate(Proposal(placement=FLOAT, phase=OWN, profile=True))

    def _known(self, proposal: Proposal) -> Trial | None:
        """The trial of this search with the same placement and nodes, if it was timed."""
        key = _key(proposal)
        return next((t for t in self.trials if t.phase != COMMIT and t.ratio and _key(t) == key), None)

    def _recall(self, proposal: Proposal) -> Trial | None:
        """The recorded trial of a proposal; after the first mismatch none are used."""
        if not self._recorded or _key(self._recorded[0]) != _key(proposal):
            self._recorded.clear()
            return None
        trial = replace(self._recorded.popleft(), phase=self._phase(proposal))
        self._contest.recall(trial)
        return self._enter(trial)

    def _phase(self, proposal: Proposal) -> str:
        """The phase of a proposal's trial: the strategy's own, or that of proposals by the caller."""
        return proposal.phase if _key(proposal) in self._awaited else OWN

    def _journalled(self, trial: Trial) -> Trial:
        if self.trials:
            trial = replace(trial, eps=self.eps)
        self._log.append(trial)
        return self._enter(trial)

    def _enter(self, trial: Trial) -> Trial:
        if not self.trials:
            if trial.number == 0 and not trial.ok:
                raise BackendError(f"the model does not run without any Q/DQ: {trial.error}")
            self._find_noise(trial)
        trial = replace(trial, eps=self.eps)
        self.trials.append(trial)
        if trial.incumbent and trial.placement.sites:
            built = [each.build_seconds for each in self.trials if each.ok and not each.subgraph]
            self.deadline.reserved = self._confirming * statistics.mean(built)
        self._report()
        return trial

    def _find_noise(self, reference: Trial) -> None:
        """Set the variation between builds, from an earlier run if recorded, else measured now."""
        known, limit = self._noise, self.deadline.seconds
        if known is not None and known.eps is not None:
            self._contest.eps = known.eps
            return
        samples = self._contest.measure_noise(reference, None if limit is None else NOISE_SHARE * limit)
        line = Trial(number=0, phase="noise", placement=reference.placement, samples=samples, eps=self.eps)
        self._log.append(line)


def _with_same_graph(trial: Trial, earlier: Trial) -> Trial:
    """The trial of a candidate whose optimized graph equals an earlier one's, with the earlier measurement."""
    outcome = Race(opponent=earlier.placement.digest, ratio=1.0, p_value=1.0, pairs=0, verdict="same graph")
    return replace(
        trial, race=outcome, ratio=earlier.ratio, samples=earlier.samples, accuracy=earlier.accuracy
    )


def _key(asked: Proposal | Trial) -> _Key:
    """The identity of a build: the placement of its pairs, and the nodes that are built."""
    return asked.placement.digest, asked.subgraph


def candidates_of(trials: Sequence[Trial]) -> int:
    """The number of builds that count in a budget."""
    return sum(trial.phase not in NOT_CANDIDATES for trial in trials)
