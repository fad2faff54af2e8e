"""Runs a strategy: asks, has the bench build and race, journals, tells; then confirms and chooses.

May import floors 0 to 3. The one loop for every strategy, in a test run, on the command line and in Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qdqspec.errors import BackendError
from qdqspec.measure.bench import Bench
from qdqspec.search.base import Strategy
from qdqspec.types import NOT_CANDIDATES, Placement, Progress, Samples, Trial

Watch = Callable[[Progress], None]

_REPEATS = (
    "noise",
    "confirm",
)  # phases that build anew what a trial has built before, and that nobody asks for


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

    def left(self, done: int) -> bool:
        """Whether another build is allowed."""
        return done < self.trials and (self.seconds is None or self.spent_seconds < self.seconds)


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
    """Build what the strategy asks for until it is done or the budget is spent.

    ``replay`` are trials of an earlier run of the same search: while the strategy asks for the same
    placements in the same order, their answers are used and nothing is built. Raises `BackendError` when the
    very first candidate, the reference itself, cannot be built; it is built whatever the budget, and again
    where it failed in the earlier run.
    """
    trials: list[Trial] = []
    noise = next((t.samples for t in replay if t.phase == "noise"), None)
    recorded = iter([t for t in replay if t.phase not in _REPEATS and (t.ok or t.number > 0)])
    expected = next(recorded, None)
    while (not trials or budget.left(_candidates(trials))) and (proposals := strategy.ask(1)):
        proposal = proposals[0]
        if expected is not None and expected.placement.digest == proposal.placement.digest:
            trial, expected = expected, next(recorded, None)
            bench.recall(trial)
        else:
            expected = None
            trial = bench.trial(
                len(trials),
                proposal.placement,
                proposal.phase,
                profile=proposal.profile,
                timed=proposal.timed,
            )
            log.append(trial)
        _check_reference(trial)
        if not trials:
            _settle_noise(trial.placement, noise, bench, log)
        trials.append(trial)
        strategy.tell([trial])
        if watch:
            watch(_progress(case, trials, budget, bench))
    return tuple(trials)


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


def _progress(case: str, trials: Sequence[Trial], budget: Budget, bench: Bench) -> Progress:
    spent = budget.spent_seconds
    done = _candidates(trials)
    by_trials = spent / len(trials) * (budget.trials - done)
    by_clock = budget.seconds - spent if budget.seconds is not None else by_trials
    verdicts = [t.race.verdict for t in trials if t.race]
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
