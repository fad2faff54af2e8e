"""Runs a strategy: ask for proposals, build and race them, write the journal, pass on the trials.

The only loop for every strategy, in a test run, on the command line and in Python.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from qdqspec.errors import BackendError
from qdqspec.measurement.bench import ASSUMED_EPS, Bench, Built
from qdqspec.search.base import Proposal, Strategy
from qdqspec.types import NOT_CANDIDATES, Placement, Progress, Trial
from qdqspec.units import count_text, seconds_text

Watch = Callable[[Progress], None]
_Key: TypeAlias = tuple[str, tuple[str, ...]]

NOISE_SHARE = 0.1  # of the time of a search, for the variation between builds
ESTIMATING = 3  # candidates from which the time of the others is estimated

_REPEATS = ("noise", "confirm")  # rebuilds of placements, which no strategy asks for
OWN, COMMIT = "own", "commit"  # phases of proposals by the caller instead of the strategy


class TrialLog(Protocol):
    """Writes trials as they happen; they are read back to resume a run."""

    def append(self, trial: Trial) -> None:
        """Write one trial so that it survives a kill after this call."""
        ...


@dataclass(slots=True)
class Budget:
    """The limits of a search: builds and seconds, whichever is reached first.

    ``used`` are those of the ``seconds`` that were spent before the search; at most half of them count, so that the
    search has the other half.
    ``confirming`` is the number of builds that follow the search. Once a candidate has won, the time that they will
    take, at the mean of the builds so far, is kept back from the seconds that are allowed, up to half of them.
    ``waited`` are the seconds that this process has waited for other runs on the device, which do not count.
    ``run_left`` are the seconds left of the time limit of the whole run, in which they do.
    So many builds as ``late`` may end after the ``seconds``.
    """

    trials: int
    seconds: float | None = None
    used: float = 0.0
    confirming: int = 0
    clock: Callable[[], float] = time.monotonic
    waited: Callable[[], float] = lambda: 0.0
    run_left: Callable[[], float | None] = lambda: None
    late: int = 0
    started: float = field(init=False)
    _builds: list[float] = field(default_factory=list, init=False)  # seconds of each
    _has_winner: bool = field(default=False, init=False)
    _were_late: int = field(default=0, init=False)  # builds that ended after the seconds

    def __post_init__(self) -> None:
        self.started = self.clock() - self.waited()

    @property
    def spent_seconds(self) -> float:
        """Seconds since the search began, without those spent waiting."""
        return self.clock() - self.waited() - self.started

    def note(self, trial: Trial) -> None:
        """Note how long a build of the search took, and whether there is a winner to confirm."""
        if trial.ok and not trial.subgraph:
            self._builds.append(trial.build_seconds)
            self._has_winner |= trial.incumbent and bool(trial.placement.sites)
        if self.late and (own := self._own_left) is not None:
            self._were_late += own <= 0

    @property
    def allowed(self) -> float | None:
        """Seconds that the search may take, its confirming builds included; ``None`` without a limit."""
        return None if self.seconds is None else self.seconds - min(self.used, self.seconds / 2)

    @property
    def left(self) -> float | None:
        """Seconds left for choosing and building candidates; ``None`` without a limit."""
        limits = [seconds for seconds in (self._own_left, self.run_left()) if seconds is not None]
        return max(0.0, min(limits)) if limits else None

    def reached(self, trials: Sequence[Trial]) -> str:
        """The limit that these trials have reached, as text; empty if another build is allowed."""
        if candidates_of(trials) >= self.trials:
            return f"its limit of {count_text(self.trials, 'build')}"
        own = self._own_left
        if self.seconds is not None and own is not None and own <= 0 and self._were_late >= self.late:
            return f"its limit of {seconds_text(self.seconds)}"
        return "the time limit of the run" if self.run_left() == 0 else ""

    @property
    def _own_left(self) -> float | None:
        """Seconds left of the limit of the search, without those kept back; ``None`` without a limit."""
        if self.allowed is None:
            return None
        kept = (
            min(self.confirming * statistics.mean(self._builds), self.allowed / 2)
            if self._has_winner
            else 0.0
        )
        return self.allowed - kept - self.spent_seconds


class Search:
    """A search in progress. Iterating runs it to its end; a caller may also run its steps one by one.

    A step is to ask, to evaluate a proposal, and to tell the strategy its trial. ``replay`` are trials of an earlier
    run of the same search: while the strategy asks for the same placements in the same order, the recorded trials are
    used and nothing is built. ``before`` are trials of the same models that were made before this search: each becomes
    one of its own once it is asked for. The reference is always built first, whatever the strategy or the budget; then
    ``given``, a proposal that is not the strategy's, which does not receive its trial.
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
        before: Sequence[Trial] = (),
        given: Proposal | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.trials: list[Trial] = []
        self._given = given
        self._strategy = strategy
        self._bench = bench
        self._budget = budget
        self._log = log
        self._case = case
        self._watch = watch
        self._noise = next((t for t in reversed(replay) if t.phase == "noise"), None)
        self._noise_seconds: float | None = None  # that measuring it may take
        self._recorded = deque(t for t in replay if t.phase not in _REPEATS and (t.ok or t.number > 0))
        self._before = {_key(trial): trial for trial in before}
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
    def spent_seconds(self) -> float:
        """Seconds since the search began, without those spent waiting for other runs."""
        return self._budget.spent_seconds

    @property
    def ended_by(self) -> str:
        """The limit that ended the search, as text; empty if its strategy was done, or more is allowed."""
        is_done = self._strategy.done() and not self._held
        return "" if is_done else self._budget.reached(self.trials)

    @property
    def least_gain(self) -> float | None:
        """The share of the time that the strategy must expect of a build; ``None`` if it estimates nothing."""
        return getattr(self._strategy, "least_gain", None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """At most ``n`` proposals; empty when the strategy has no more or the budget is spent."""
        if self.trials and self._given is not None:
            given, self._given = self._given, None
            self.evaluate_also(given)
        if self.trials and self._budget.reached(self.trials):
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
        known = self._known(proposal) or self._recall(proposal) or self._take_over(proposal)
        return known or self.measure(self.build(proposal))

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
        self._report(f"building {self._next}")
        return self._bench.build(
            len(self.trials),
            proposal.placement,
            self._phase(proposal),
            profile=proposal.profile,
            timed=proposal.timed,
            subgraph=proposal.subgraph,
        )

    def measure(self, built: Built) -> Trial:
        """Race a built candidate, and write its trial to the journal."""
        self._report(f"timing {self._next}")
        return self._journalled(replace(self._bench.measure(built), number=len(self.trials)))

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
        self._bench.recall(trial)
        return self._journalled(trial)

    def resume(self) -> None:
        """Restore all trials of the earlier run at once, in whatever order they were requested.

        The strategy receives those it asks for; its first new proposal waits for `ask`.
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

    def _report(self, doing: str = "") -> None:
        """Report the progress at the beginning of a step, or after a new trial."""
        if self._watch is None:
            return
        trials, budget = self.trials, self._budget
        spent, done = budget.spent_seconds, candidates_of(trials)
        limits = [budget.run_left(), None if budget.allowed is None else budget.allowed - spent]
        if done >= ESTIMATING:
            limits.append(spent / len(trials) * (budget.trials - done))
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
                total=budget.trials,
                best=self._bench.best,
                kept=verdicts.count("faster"),
                dropped=verdicts.count("slower"),
                undecided=verdicts.count("no difference") + verdicts.count("same graph"),
                failed=sum(not t.ok for t in trials),
                seconds=spent,
                seconds_left=min(left, default=None),
                doing=doing,
            )
        )

    @property
    def _next(self) -> str:
        return f"candidate {len(self.trials)}" if self.trials else "the reference"

    def _begin(self, proposal: Proposal) -> None:
        if not self.trials and (proposal.placement.sites or proposal.subgraph):
            self.evaluate(Proposal(placement=Placement(sites=frozenset()), phase=OWN, profile=True))

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
        self._bench.recall(trial)
        return self._enter(trial)

    def _take_over(self, proposal: Proposal) -> Trial | None:
        """The trial that was made before the search, if it has all that is asked for and its race is still valid.

        That is a race against the present incumbent, or of a candidate that was faster and missed a limit.
        """
        trial = self._before.get(_key(proposal))
        if trial is None or not proposal.timed or (proposal.profile and not trial.layers):
            return None
        if trial.race is not None and (trial.incumbent or trial.race.verdict != "faster"):
            best = next(t for t in reversed(self.trials) if t.incumbent)
            if trial.race.opponent != best.placement.digest:
                return None
        trial = replace(trial, number=len(self.trials), phase=self._phase(proposal))
        self._bench.recall(trial)
        return self._journalled(trial)

    def _phase(self, proposal: Proposal) -> str:
        """The phase of a proposal's trial: the strategy's own, or that of proposals by the caller."""
        return proposal.phase if _key(proposal) in self._awaited else OWN

    def _journalled(self, trial: Trial) -> Trial:
        if self.trials:
            trial = replace(trial, eps=self._bench.eps)
        self._log.append(trial)
        return self._enter(trial)

    def _enter(self, trial: Trial) -> Trial:
        if not self.trials:
            if trial.number == 0 and not trial.ok:
                raise BackendError(f"the model does not run without any Q/DQ: {trial.error}")
            left = self._budget.left
            self._noise_seconds = None if left is None else NOISE_SHARE * left
            self._bench.eps = ASSUMED_EPS
            self._bench.settle = partial(self._settle_noise, trial)
        if self._bench.settle is not None and (trial.race is not None or self._budget.seconds is None):
            self._bench.settle()
        self._budget.note(trial)
        trial = replace(trial, eps=self._bench.eps)
        self.trials.append(trial)
        self._report()
        return trial

    def _settle_noise(self, reference: Trial) -> None:
        """Give the bench the variation between builds, from an earlier run if recorded, else measured now.

        In a search with a time limit that is after the first race, which is run with an assumed variation, so that a
        faster placement is known earlier, or during it if its result depends on the variation.
        """
        bench, known, seconds = self._bench, self._noise, self._noise_seconds
        bench.settle = None
        if known is not None and known.eps is not None:
            bench.eps = known.eps
        else:
            noise = bench.measure_noise(reference.placement, seconds)
            line = Trial(number=0, phase="noise", placement=reference.placement, samples=noise, eps=bench.eps)
            self._log.append(line)


def _key(asked: Proposal | Trial) -> _Key:
    """The identity of a build: the placement of its pairs, and the nodes that are built."""
    return asked.placement.digest, asked.subgraph


def candidates_of(trials: Sequence[Trial]) -> int:
    """The number of builds that count in a budget."""
    return sum(trial.phase not in NOT_CANDIDATES for trial in trials)
