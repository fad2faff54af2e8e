"""Runs a strategy: asks, has the bench build and race, journals, tells; then confirms and chooses.

May import floors 0 to 3. The one loop for every strategy, in a test run, on the command line and in Python.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from qdqspec.errors import BackendError
from qdqspec.measure.bench import Bench, Built
from qdqspec.search.base import Proposal, Strategy
from qdqspec.types import NOT_CANDIDATES, Placement, Progress, Race, Samples, Trial
from qdqspec.units import count_text, seconds_text

Watch = Callable[[Progress], None]
_Key: TypeAlias = tuple[str, tuple[str, ...]]

_REPEATS = ("noise", "confirm")  # build anew what a trial has built before; nobody asks for them
OWN, COMMIT = "own", "commit"  # phases of what the caller asks for, and not the strategy


class TrialLog(Protocol):
    """Where trials are written as they happen, and read back when a run is resumed."""

    def append(self, trial: Trial) -> None:
        """Write one trial so that a kill after this call does not lose it."""
        ...


@dataclass(slots=True)
class Budget:
    """How much may be spent: search builds and seconds, whichever is reached first."""

    trials: int
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def spent_seconds(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.started

    def reached(self, done: int) -> str:
        """The limit that is reached after so many builds, in words; empty while another one is allowed."""
        if done >= self.trials:
            return f"its limit of {count_text(self.trials, 'build')}"
        if self.seconds is not None and self.spent_seconds >= self.seconds:
            return f"its limit of {seconds_text(self.seconds)}"
        return ""


class Search:
    """One search under way. Iterating takes it to its end; a caller may also take the steps himself.

    A step is to ask, to evaluate what was asked for, and to tell what came of it. ``replay`` are trials of an
    earlier run of the same search: while the strategy asks for the same in the same order, their answers are
    used and nothing is built. The reference comes first, whatever the strategy asks, and whatever the budget.
    """

    def __init__(
        self,
        strategy: Strategy,
        bench: Bench,
        budget: Budget,
        log: TrialLog,
        *,
        case: str,
        replay: Sequence[Trial] = (),
        watch: Watch | None = None,
    ) -> None:
        self.trials: list[Trial] = []
        self._strategy = strategy
        self._bench = bench
        self._budget = budget
        self._log = log
        self._case = case
        self._watch = watch
        self._noise = next((t.samples for t in replay if t.phase == "noise"), None)
        self._recorded = deque(t for t in replay if t.phase not in _REPEATS and (t.ok or t.number > 0))
        self._held: list[Proposal] = []  # asked of the strategy, and not yet handed on
        self._awaited: set[_Key] = set()  # handed on, and not yet told

    def __iter__(self) -> Iterator[Trial]:
        while proposals := self.ask():
            trial = self.evaluate(proposals[0])
            self.tell([trial])
            yield trial

    def run(self) -> tuple[Trial, ...]:
        """Take it to its end."""
        for _ in self:
            pass
        return tuple(self.trials)

    @property
    def ended_by(self) -> str:
        """The limit that ended it, in words; empty where its strategy was done, or more is allowed."""
        is_done = self._strategy.done() and not self._held
        return "" if is_done else self._budget.reached(_candidates(self.trials))

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """What to build next, at most ``n``; nothing when the strategy has no more or the budget is spent."""
        if self.trials and self._budget.reached(_candidates(self.trials)):
            return ()
        proposals = self._held[:n] or self._strategy.ask(n)
        self._held = self._held[n:]
        self._awaited.update(map(_key, proposals))
        return proposals

    def evaluate(self, proposal: Proposal) -> Trial:
        """What a proposal comes to: as an earlier run found it, else built and raced now, and journalled.

        What was built before is not built again. Raises `BackendError` when the reference itself does not run.
        """
        self._begin(proposal)
        return self._known(proposal) or self._recall(proposal) or self.measure(self.build(proposal))

    def build(self, proposal: Proposal) -> Built:
        """Only build a proposal; `measure` makes a trial of it."""
        self._begin(proposal)
        return self._bench.build(
            len(self.trials),
            proposal.placement,
            proposal.phase if _key(proposal) in self._awaited else OWN,
            profile=proposal.profile,
            timed=proposal.timed,
            subgraph=proposal.subgraph,
        )

    def measure(self, built: Built) -> Trial:
        """Race what was built, and journal it."""
        return self._journalled(replace(self._bench.measure(built), number=len(self.trials)))

    def tell(self, trials: Sequence[Trial]) -> None:
        """Tell the strategy what came of its proposals; of others it is not told."""
        answers = [trial for trial in trials if _key(trial) in self._awaited]
        self._awaited.difference_update(map(_key, answers))
        self._strategy.tell(answers)

    def commit(self, placement: Placement) -> Trial:
        """Make a placement the one to beat, whatever its races said. Raises `BackendError` where it fails."""
        known = self.evaluate(Proposal(placement=placement, phase=OWN))
        if not known.ok:
            raise BackendError(f"the placement cannot be the one to beat: {known.error}")
        trial = replace(known, number=len(self.trials), phase=COMMIT, incumbent=True, race=None, layers=())
        self._bench.recall(trial)
        return self._journalled(trial)

    def resume(self) -> None:
        """Take in all of the earlier run at once, in whatever order it was asked for.

        The strategy is told what it asks for of it; its first new question waits for `ask`.
        """
        known: dict[_Key, Trial] = {}
        while self._recorded:
            trial = self._recorded.popleft()
            self._bench.recall(trial)
            trial = self._enter(trial)
            if trial.phase != COMMIT:
                known[_key(trial)] = trial
        while not self._held and (proposals := self._strategy.ask(1)):
            answer = known.pop(_key(proposals[0]), None)
            if answer is None:
                self._held = list(proposals)
            else:
                self._strategy.tell([answer])

    def _begin(self, proposal: Proposal) -> None:
        if not self.trials and (proposal.placement.sites or proposal.subgraph):
            self.evaluate(Proposal(placement=Placement(sites=frozenset()), phase=OWN, profile=True))

    def _known(self, proposal: Proposal) -> Trial | None:
        """The trial of this search that built and timed the same."""
        key = _key(proposal)
        return next((t for t in self.trials if t.phase != COMMIT and t.ratio and _key(t) == key), None)

    def _recall(self, proposal: Proposal) -> Trial | None:
        """The recorded trial of a proposal; from where another one was recorded, none are taken."""
        if not self._recorded or _key(self._recorded[0]) != _key(proposal):
            self._recorded.clear()
            return None
        trial = self._recorded.popleft()
        self._bench.recall(trial)
        return self._enter(trial)

    def _journalled(self, trial: Trial) -> Trial:
        if self.trials:  # how much builds differ is learnt right after the first
            trial = replace(trial, eps=self._bench.eps)
        self._log.append(trial)
        return self._enter(trial)

    def _enter(self, trial: Trial) -> Trial:
        if not self.trials:
            _check_reference(trial)
            _settle_noise(trial.placement, self._noise, self._bench, self._log)
        trial = replace(trial, eps=self._bench.eps)
        self.trials.append(trial)
        if self._watch:
            self._watch(_progress(self._case, self.trials, self._budget, self._bench))
        return trial


def search(
    strategy: Strategy,
    bench: Bench,
    budget: Budget,
    log: TrialLog,
    *,
    case: str,
    replay: Sequence[Trial] = (),
    watch: Watch | None = None,
) -> tuple[Trial, ...]:
    """Build what the strategy asks for until it is done or the budget is spent; see `Search`."""
    return Search(strategy, bench, budget, log, case=case, replay=replay, watch=watch).run()


def _key(asked: Proposal | Trial) -> _Key:
    """What makes two builds the same: where the pairs stand, and in how much of the model."""
    return asked.placement.digest, asked.subgraph


def _candidates(trials: Sequence[Trial]) -> int:
    return sum(trial.phase not in NOT_CANDIDATES for trial in trials)


def _settle_noise(reference: Placement, known: Samples | None, bench: Bench, log: TrialLog) -> None:
    """Have the bench know how much builds differ, from an earlier run where that measured it."""
    if known is not None:
        bench.recall_noise(known)
    else:
        noise = bench.measure_noise(reference)
        log.append(Trial(number=0, phase="noise", placement=reference, samples=noise))


def _check_reference(trial: Trial) -> None:
    if trial.number == 0 and not trial.ok:
        raise BackendError(f"the model does not run without any Q/DQ: {trial.error}")


def _fate(trial: Trial, race: Race) -> str:
    """What its race came to; who won it and was not accurate enough is dropped all the same."""
    return "slower" if race.verdict == "faster" and not trial.incumbent else race.verdict


def _progress(case: str, trials: Sequence[Trial], budget: Budget, bench: Bench) -> Progress:
    spent = budget.spent_seconds
    done = _candidates(trials)
    by_trials = spent / len(trials) * (budget.trials - done)
    by_clock = budget.seconds - spent if budget.seconds is not None else by_trials
    verdicts = [_fate(t, t.race) for t in trials if t.race and not t.subgraph]
    return Progress(
        case=case,
        phase=trials[-1].phase,
        done=done,
        total=budget.trials,
        best=bench.best,
        kept=verdicts.count("faster"),
        dropped=verdicts.count("slower"),
        undecided=verdicts.count("no difference") + verdicts.count("same graph"),
        failed=sum(not t.ok for t in trials),
        seconds=spent,
        seconds_left=max(0.0, min(by_trials, by_clock)),
    )
