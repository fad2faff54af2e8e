"""The search loop of any strategy: budget, journal, resume, and the required reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from qdqspec._core.progress import Deadline
from qdqspec.errors import BackendError
from qdqspec.search.base import Proposal
from qdqspec.search.loop import Built, Search
from qdqspec.types import Placement, Progress, Race, Samples, Trial
from tests.support.lab import REFERENCE, placement

NOISE = Samples(wall_ms=(1.0, 1.1, 1.2))


NAMES = ("reference", "a", "b", "c", "d", "e")
PLACED = {"reference": REFERENCE, **{name: placement(name) for name in NAMES[1:]}}
NAME_OF = {placed.digest: name for name, placed in PLACED.items()}


@dataclass
class Script:
    """A strategy that proposes named placements in order and stores the results."""

    names: Sequence[str] = NAMES
    received: list[Trial] = field(default_factory=list)
    asked: int = 0

    def ask(self, n: int = 1) -> list[Proposal]:
        batch = self.names[self.asked : self.asked + n]
        self.asked += len(batch)
        return [Proposal(placement=PLACED[name], phase="pure", profile=name == "a") for name in batch]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.received.extend(trials)

    def done(self) -> bool:
        return self.asked >= len(self.names)


class Contest:
    """A contest without measurements: candidates in ``fails`` fail, ``a`` and ``c`` win."""

    def __init__(self, fails: Sequence[str] = (), log: list[Trial] | None = None) -> None:
        self.fails, self.log = fails, log
        self.built: list[str] = []
        self.recalled: list[str] = []
        self.best: float | None = None
        self.eps = 0.01
        self.seconds = 0.0  # of each build

    def build(self, number: int, proposal: Proposal) -> Built:
        return Built(self._trial(number, proposal.placement, proposal.phase))

    def measure(self, built: Built) -> Trial:
        return built.trial

    def _trial(self, number: int, what: Placement, phase: str) -> Trial:
        name = NAME_OF[what.digest]
        self.built.append(name)
        if self.log is not None:
            assert sum(t.phase != "noise" for t in self.log) == number  # the last trial is in the journal
        trial = Trial(number=number, phase=phase, placement=what, build_seconds=self.seconds)
        if name in self.fails:
            return replace(trial, status="failed", error=f"{name} is broken")
        won = name in ("reference", "a", "c")
        self.best = 1.0 - number / 10 if won else self.best
        verdict = "faster" if won else "slower"
        race = Race(opponent="x", ratio=0.9, p_value=0.0, pairs=6, verdict=verdict) if number else None
        return replace(trial, incumbent=won, ratio=self.best, race=race)

    def recall(self, trial: Trial) -> None:
        self.recalled.append(NAME_OF[trial.placement.digest])
        self.best = trial.ratio if trial.incumbent else self.best

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        self.built.append("noise")
        self.eps = 0.03
        return NOISE


def search_of(
    script: Script, contest: Contest, *, trials: int = 60, log=None, deadline=None, **more
) -> Search:
    limits = {"case": "case", "most_trials": trials, **more}
    log = [] if log is None else log
    return Search(script, contest, deadline or Deadline(), log, **limits)  # type: ignore[arg-type] # stand-ins


def run(contest: Contest, *, seconds=None, names=NAMES, **more):
    clock = iter(range(10_000))
    deadline = Deadline(seconds=seconds, clock=lambda: float(next(clock)))
    script = Script(names)
    return search_of(script, contest, deadline=deadline, **more).run(), script


def names_of(trials: Sequence[Trial]) -> list[str]:
    return [NAME_OF[trial.placement.digest] for trial in trials]


def test_every_proposal_is_built_reported_and_written_to_the_journal_once() -> None:
    log = list[Trial]()
    contest = Contest(log=log)
    trials, script = run(contest, log=log)
    assert names_of(trials) == list(NAMES)
    assert [trial.number for trial in trials] == list(range(6))
    assert tuple(script.received) == trials
    assert contest.built == ["reference", "noise", *NAMES[1:]]
    assert [trial.phase for trial in log] == ["pure", "noise", *["pure"] * 5]
    assert log[1].samples == NOISE


@pytest.mark.parametrize("spent", [{"trials": 0}, {"seconds": 0.0}])
def test_the_reference_is_built_for_any_budget(spent: dict) -> None:
    assert names_of(run(Contest(), **spent)[0]) == ["reference"]


def test_a_failed_build_of_the_reference_is_an_error() -> None:
    contest, log = Contest(fails=("reference",)), list[Trial]()
    with pytest.raises(BackendError, match="without any Q/DQ: reference is broken"):
        run(contest, log=log)
    assert contest.built == ["reference"]
    assert not log[0].ok


def test_progress_counts_the_results_of_trials() -> None:
    seen: list[Progress] = []
    run(Contest(fails=("b",)), trials=10, seconds=1000.0, watch=seen.append)
    assert [progress.done for progress in seen if not progress.doing] == [1, 2, 3, 4, 5, 6]
    steps = [progress.doing for progress in seen if progress.doing]
    assert steps[1:3] == ["building the reference", "timing the reference"]
    last = seen[-1]
    assert (last.kept, last.dropped, last.failed, last.total, last.case) == (2, 2, 1, 10, "case")
    assert last.best == pytest.approx(0.7)
    assert last.seconds_left is not None
    assert 0 <= last.seconds_left <= 1000


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        ({"trials": 4}, "its limit of 4 builds"),
        ({"trials": 60, "seconds": 3.0}, "its limit of 3.0 s"),
        ({"trials": 60, "seconds": 90.0, "tick": 40.0}, "its limit of 1 min 30 s"),
        ({"trials": 6}, ""),  # exactly the number of proposals
    ],
)
def test_the_search_reports_the_limit_that_ended_it(budget: dict, limit: str) -> None:
    tick, clock = budget.pop("tick", 1.0), iter(range(10_000))
    deadline = Deadline(seconds=budget.pop("seconds", None), clock=lambda: tick * next(clock))
    search = search_of(Script(NAMES), Contest(), deadline=deadline, **budget)
    search.run()
    assert search.ended_by == limit


# ---- resume -------------------------------------------------------------------------------------


def journal(*names: str) -> list[Trial]:
    """The journal of a run that was killed after these placements."""
    log = list[Trial]()
    run(Contest(), names=names, log=log)
    return log


def test_proposals_are_built_from_the_first_difference_to_the_journal_on() -> None:
    contest = Contest()
    trials, _ = run(contest, replay=journal("reference", "a", "c", "b"))
    assert contest.built == ["b", "c", "d", "e"]
    assert names_of(trials) == list(NAMES)


def test_the_result_of_a_subgraph_is_not_used_for_the_whole_model() -> None:
    """A placement may be proposed for a subgraph and for the whole model."""
    contest = Contest()
    part = Trial(number=1, phase="isolated", placement=placement("a"), ratio=0.5, subgraph=("n",))
    trials, _ = run(contest, replay=[*journal("reference"), part])
    assert contest.built == list(NAMES[1:])
    assert not any(trial.subgraph for trial in trials)


def test_confirmations_of_the_journal_are_not_replayed_as_trials() -> None:
    contest = Contest()
    confirm = Trial(number=2, phase="confirm", placement=placement("b"), ratio=0.5)
    trials, _ = run(contest, replay=[*journal("reference", "a"), confirm])
    assert contest.built == ["b", "c", "d", "e"]
    assert trials[2].ratio != 0.5


def test_time_for_confirmation_builds_is_reserved_once_a_candidate_has_won() -> None:
    deadline, left = Deadline(seconds=40.0, clock=lambda: 0.0), list[float | None]()
    contest = Contest()
    contest.seconds = 2.0
    search = search_of(Script(NAMES), contest, deadline=deadline, confirming=5)
    for _ in search:
        left.append(deadline.left)
    assert left[:2] == [40.0, 30.0]
