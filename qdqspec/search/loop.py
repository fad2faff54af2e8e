"""The loop of a search, for every strategy: ask for proposals, build them, decide who wins, write the journal, tell.

`Contest` decides which candidate wins, `Search.ended_by` why the search ended.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeAlias

import numpy as np

from qdqspec._core.progress import Deadline
from qdqspec._core.units import count_text
from qdqspec.backends import Engine
from qdqspec.errors import BackendError, PlacementError
from qdqspec.search.base import Proposal, Strategy
from qdqspec.search.journal import Journal
from qdqspec.search.limits import Limits
from qdqspec.timing import Bench
from qdqspec.types import NO_PAIRS, NOT_CANDIDATES, Placement, Progress, Race, Samples, Trial

_Key: TypeAlias = tuple[str, tuple[str, ...]]

ESTIMATING = 3  # candidates from which the time of the others is estimated

_REPEATS = ("noise", "confirm")  # rebuilds of placements, which no strategy asks for
OWN = "own"  # phase of the reference
COMMIT = "commit"  # phase of a placement that the caller makes the incumbent


@dataclass(slots=True)
class Built:
    """A built candidate, or the trial of a failed build. It must be measured once, or closed."""

    trial: Trial
    engine: Engine | None = None
    profile: bool = False

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
    meets the ``limits`` on all data. A candidate that the limits exclude is not raced: its ratio comes from a few runs.
    A candidate with the optimized graph of an earlier one takes over its result. Parts of the model are raced for a
    gain of ``part_eps``: a smaller value takes longer races. A gain of ``clear`` times ``eps``, at least eight
    deviations between builds, wins in one race: with a larger value more wins cost two further builds.
    """

    def __init__(
        self, bench: Bench, limits: Limits | None = None, *, part_eps: float = 0.01, clear: float = 4.0
    ) -> None:
        self.eps = bench.floor_eps
        self.best: float | None = None  # the incumbent's time over the reference's
        self.limits = limits or Limits()
        self._bench, self._part_eps, self._clear = bench, part_eps, clear
        self._incumbent = NO_PAIRS
        self._seen: dict[str, Trial] = {}  # by hash of the optimized graph

    def build(self, number: int, proposal: Proposal) -> Built:
        """Build a proposal. The result must be measured or closed."""
        started = time.perf_counter()
        placement, subgraph = proposal.placement, proposal.subgraph
        trial = Trial(number=number, phase=proposal.phase, placement=placement, subgraph=subgraph)
        engine = None
        try:
            engine = self._bench.open(placement, subgraph)
            trial = replace(trial, graph_hash=engine.graph_hash)
        except (BackendError, PlacementError) as error:
            trial = replace(trial, status="failed", error=self._bench.reason(error))
        trial = replace(trial, build_seconds=time.perf_counter() - started)
        return Built(trial, engine, profile=proposal.profile)

    def measure(self, built: Built) -> Trial:
        """The trial of a built candidate. Its engine is closed unless it won; a failure of the backend is a trial."""
        if built.engine is None:
            return built.trial
        try:
            trial = self._of_part(built) if built.trial.subgraph else self._of_whole(built)
        except BackendError as error:
            return replace(built.trial, status="failed", error=self._bench.reason(error), graph_hash="")
        finally:
            if built.engine is not None and not self._bench.keeps(built.engine):
                built.close()
        if not trial.subgraph:
            self._bench.look()
        return trial

    def recall(self, trial: Trial) -> None:
        """Restore a trial of an earlier run as if it had been measured now, without building anything."""
        if trial.ok and trial.ratio is not None and not trial.subgraph:
            self._seen.setdefault(trial.graph_hash, trial)
        self.limits.learn(trial)
        if trial.incumbent:
            self._incumbent, self.best = trial.placement, trial.ratio or 1.0

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        """Set ``eps`` by the variation between builds; see `Bench.measure_variation`."""
        self.eps, samples = self._bench.measure_variation(reference, seconds)
        return samples

    def _of_whole(self, built: Built) -> Trial:
        """The trial of a whole model: its accuracy, its times, its race, and the limits if it won.

        If its layers cannot be timed, a note has the reason, and the engine is built again.
        """
        bench, limits = self._bench, self.limits
        with bench.several(built.trial.placement, _open(built)) as several:
            trial = limits.measure(built.trial, several)
        before = self._seen.get(trial.graph_hash) if trial.graph_hash and self.best is not None else None
        if before is not None:
            opponent = before.placement.digest
            same = Race(opponent=opponent, ratio=1.0, p_value=1.0, pairs=0, verdict="same graph")
            trial = replace(trial, ratio=before.ratio, samples=before.samples, layers=before.layers)
            return replace(trial, race=same, accuracy=before.accuracy)
        notes = tuple[str, ...]()
        with bench.exclusive():
            samples = bench.warm(_open(built))
            trial = replace(trial, samples=samples)
            if built.profile:
                try:
                    trial = replace(trial, layers=bench.layers(_open(built), samples))
                except BackendError as error:
                    self._rebuild(built)
                    notes = (f"layers were not timed: {bench.reason(error)}",)
            if self.best is None:
                trial = replace(trial, incumbent=True, ratio=1.0)
            elif limits.excludes(trial.placement):
                theirs = bench.kept(self._incumbent).time(len(samples.wall_ms), warmup=1)
                ratio = samples.median_ms(bench.clock) / theirs.median_ms(bench.clock)
                trial = replace(trial, ratio=ratio * self.best)  # enough to learn from, not to win
            else:
                trial = self._raced(trial, built, self.best)
        trial = replace(trial, samples=replace(trial.samples, notes=(*trial.samples.notes, *notes)))
        if trial.incumbent:
            with bench.several(trial.placement, _open(built)) as several:
                trial = limits.score(trial, several)
        if trial.incumbent:
            self._incumbent, self.best = trial.placement, trial.ratio or 1.0
            bench.keep(trial.placement, _open(built))
        self._seen[trial.graph_hash] = trial
        return trial

    def _raced(self, trial: Trial, built: Built, best: float) -> Trial:
        """Race a challenger. A small gain must be won again, with both built anew, so that the mean is significant.

        Builds of one model differ by more than a race resolves: without the second race one in six challengers that
        were no faster won, with it one in twenty (simulated, 1.2 % between builds; docs/decisions/0007).
        """
        bench = self._bench
        raced = bench.race(_open(built), self._incumbent, self.eps)
        outcome = raced.outcome
        if outcome.verdict == "faster" and outcome.ratio > (1 - self.eps) ** self._clear:
            bench.drop()
            self._rebuild(built)
            enough = float(np.clip(1 - (1 - self.eps) ** 2 / outcome.ratio, bench.floor_eps, self.eps))
            again = bench.race(_open(built), self._incumbent, enough)
            raced = raced.with_second(again, bench.clock)
        return replace(
            trial,
            race=raced.outcome,
            samples=raced.ours,
            rival=raced.theirs,
            ratio=raced.outcome.ratio * best,
            incumbent=raced.outcome.verdict == "faster",
        )

    def _of_part(self, built: Built) -> Trial:
        """The trial of a part of the model, raced against the same nodes in float; it never becomes the incumbent."""
        bench, engine, trial = self._bench, _open(built), built.trial
        placement, nodes = trial.placement, trial.subgraph
        with bench.exclusive():
            screened = bench.warm(engine)
            if not placement.sites:
                bench.keep(placement, engine, nodes)
                trial = replace(trial, samples=screened, ratio=1.0)
            else:
                outcome, ours, theirs = bench.race(engine, NO_PAIRS, self._part_eps, nodes)
                trial = replace(trial, samples=ours, rival=theirs, race=outcome, ratio=outcome.ratio)
            layers = bench.layers(engine, screened) if built.profile else ()
        return replace(trial, layers=layers)

    def _rebuild(self, built: Built) -> None:
        built.close()
        built.engine = None  # it may not build again
        built.engine = self._bench.open(built.trial.placement)
        self._bench.warm(built.engine)


def _open(built: Built) -> Engine:
    assert built.engine is not None
    return built.engine


@dataclass(eq=False)
class Search:
    """A search in progress. Iterating runs it to its end; a caller may also run its steps one by one.

    A step is to ask, to evaluate a proposal, and to tell the strategy its trial. ``most_trials`` is the largest number
    of builds. The trials of an earlier run, ``replay``, are restored at once, in whatever order they were requested;
    the strategy receives those it asks for. The reference is always built first; then ``given``, a proposal that is not
    the strategy's. ``confirming`` is the number of builds after the search: once a candidate has won, their time is
    reserved. ``variation_share`` of the time limit may go to the variation between builds: with less time it is known
    less well, and only larger gains win a race.
    """

    strategy: Strategy
    contest: Contest
    deadline: Deadline
    log: Journal
    _: KW_ONLY
    case: str
    most_trials: int
    confirming: int = 0
    replay: Sequence[Trial] = ()
    given: Proposal | None = None
    watch: Callable[[Progress], None] = lambda _: None
    variation_share: float = 0.05
    trials: list[Trial] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._held: list[Proposal] = []  # asked of the strategy and not yet returned
        self._awaited: set[_Key] = set()  # returned and not yet told
        self._restore([t for t in self.replay if t.phase not in _REPEATS and (t.ok or t.number > 0)])

    def __iter__(self) -> Iterator[Trial]:
        while proposals := self.ask():
            trials = list(map(self.evaluate, proposals))
            self.tell(trials)
            yield from trials

    def run(self) -> tuple[Trial, ...]:
        """Run to the end."""
        deque(self, maxlen=0)
        return tuple(self.trials)

    @property
    def candidates(self) -> int:
        """The number of builds that count in the budget."""
        return sum(trial.phase not in NOT_CANDIDATES for trial in self.trials)

    @property
    def ended_by(self) -> str:
        """The limit that ended the search, as text; empty if its strategy was done, or more is allowed."""
        is_done = self.strategy.done() and not self._held
        return "" if is_done else self._limit

    @property
    def _limit(self) -> str:
        """The limit that is reached, as text; empty if another build is allowed."""
        if self.candidates >= self.most_trials:
            return f"its limit of {count_text(self.most_trials, 'build')}"
        return self.deadline.reached

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """At most ``n`` proposals; empty when the strategy has no more or a limit is reached."""
        if self.trials and self.given is not None:
            given, self.given = self.given, None
            self.evaluate(given)
        if self.trials and self._limit:
            return ()
        self._report("choosing candidates")
        proposals = self._held[:n] or self.strategy.ask(n)
        self._held = self._held[n:]
        self._awaited.update(map(_key, proposals))
        return proposals

    def evaluate(self, proposal: Proposal) -> Trial:
        """The trial of a proposal, built and raced now, and written to the journal.

        A known placement is not built again. Raises `BackendError` if the reference itself does not run.
        """
        key = _key(proposal)
        known = (t for t in self.trials if t.phase != COMMIT and t.ratio and _key(t) == key)
        return next(known, None) or self.measure(self.build(proposal))

    def build(self, proposal: Proposal) -> Built:
        """Only build a proposal; `measure` makes a trial of it."""
        if not self.trials and (proposal.placement.sites or proposal.subgraph):
            self.evaluate(Proposal(placement=NO_PAIRS, phase=OWN, profile=True))
        self._report(f"building {self._next_text}")
        return self.contest.build(len(self.trials), proposal)

    def measure(self, built: Built) -> Trial:
        """Race a built candidate, and write its trial to the journal."""
        self._report(f"timing {self._next_text}")
        return self._journalled(replace(self.contest.measure(built), number=len(self.trials)))

    def tell(self, trials: Sequence[Trial]) -> None:
        """Pass the trials of the strategy's proposals to it; others are not passed."""
        answers = [trial for trial in trials if _key(trial) in self._awaited]
        self._awaited.difference_update(map(_key, answers))
        self.strategy.tell(answers)

    def commit(self, placement: Placement) -> Trial:
        """Make a placement the incumbent, whatever its race results. Raises `BackendError` if it fails."""
        known = self.evaluate(Proposal(placement=placement, phase=OWN))
        if not known.ok:
            raise BackendError(f"the placement cannot be the one to beat: {known.error}")
        trial = replace(known, number=len(self.trials), phase=COMMIT, incumbent=True, race=None, layers=())
        self.contest.recall(trial)
        return self._journalled(trial)

    def _restore(self, recorded: Sequence[Trial]) -> None:
        """Restore the trials of an earlier run; the first new proposal of the strategy waits for `ask`."""
        known: dict[_Key, Trial] = {}
        for trial in recorded:
            self.contest.recall(trial)
            trial = self._enter(trial)
            if trial.phase != COMMIT:
                known[_key(trial)] = trial
            while True:  # the strategy learns of each trial before it can know of later ones by the limits
                self._held = self._held or list(self.strategy.ask(1))
                answer = known.pop(_key(self._held[0]), None) if self._held else None
                if answer is None:
                    break
                self._held = []
                self.strategy.tell([answer])
        if self.given is not None and _key(self.given) in map(_key, self.trials):
            self.given = None

    def _report(self, doing: str = "") -> None:
        """Report the progress at the beginning of a step, or after a new trial."""
        trials, done = self.trials, self.candidates
        limits = [self.deadline.left]
        if done >= ESTIMATING:
            limits.append(self.deadline.spent / len(trials) * (self.most_trials - done))
        verdicts = Counter(  # a faster one that was not accurate enough counts as slower
            "slower" if each.race.verdict == "faster" and not each.incumbent else each.race.verdict
            for each in trials
            if each.race and not each.subgraph
        )
        self.watch(
            Progress(
                case=self.case,
                phase=trials[-1].phase if trials else "",
                done=done,
                total=self.most_trials,
                best=self.contest.best,
                kept=verdicts["faster"],
                dropped=verdicts["slower"],
                undecided=verdicts["no difference"] + verdicts["same graph"],
                failed=sum(not t.ok for t in trials),
                seconds=self.deadline.spent,
                seconds_left=min((max(0.0, each) for each in limits if each is not None), default=None),
                doing=doing,
            )
        )

    @property
    def _next_text(self) -> str:
        return f"candidate {len(self.trials)}" if self.trials else "the reference"

    def _journalled(self, trial: Trial) -> Trial:
        if self.trials:
            trial = replace(trial, eps=self.contest.eps)
        self.log.append(trial)
        return self._enter(trial)

    def _enter(self, trial: Trial) -> Trial:
        if not self.trials:
            if trial.number == 0 and not trial.ok:
                raise BackendError(f"the model does not run without any Q/DQ: {trial.error}")
            self._find_variation(trial)
        trial = replace(trial, eps=self.contest.eps)
        self.trials.append(trial)
        if trial.incumbent and trial.placement.sites:
            built = [each.build_seconds for each in self.trials if each.ok and not each.subgraph]
            self.deadline.reserved = self.confirming * statistics.mean(built)
        self._report()
        return trial

    def _find_variation(self, reference: Trial) -> None:
        """Set the variation between builds, from an earlier run if recorded, else measured now."""
        known = next((t for t in reversed(self.replay) if t.phase == "noise"), None)
        limit = self.deadline.seconds
        if known is not None and known.eps is not None:
            self.contest.eps = known.eps
            return
        samples = self.contest.measure_variation(
            reference, None if limit is None else self.variation_share * limit
        )
        noise = Trial(number=0, phase="noise", placement=reference.placement, samples=samples)
        self.log.append(replace(noise, eps=self.contest.eps))


def _key(asked: Proposal | Trial) -> _Key:
    """The identity of a build: the placement of its pairs, and the nodes that are built."""
    return asked.placement.digest, asked.subgraph
