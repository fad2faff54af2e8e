"""The search loop of any strategy: budget, journal, resume, and the required reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from searches import Additive, limited

from qdqspec._core.progress import Deadline
from qdqspec._core.registry import names, resolve
from qdqspec.errors import BackendError
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.loop import Built, Search
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import Progress, Race, Samples, Trial
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
        self.best: float | None = None
        self.eps = 0.01
        self.seconds = 0.0  # of each build

    def build(self, number: int, proposal: Proposal) -> Built:
        self.built.append(name := NAME_OF[proposal.placement.digest])
        if self.log is not None:
            assert sum(t.phase != "noise" for t in self.log) == number  # the last trial is in the journal
        how = {"placement": proposal.placement, "build_seconds": self.seconds}
        trial = Trial(number=number, phase=proposal.phase, **how)
        if name in self.fails:
            return Built(replace(trial, status="failed", error=f"{name} is broken"))
        won = name in ("reference", "a", "c")
        self.best = 1.0 - number / 10 if won else self.best
        verdict = "faster" if won else "slower"
        race = Race(opponent="x", ratio=0.9, p_value=0.0, pairs=6, verdict=verdict) if number else None
        return Built(replace(trial, incumbent=won, ratio=self.best, race=race))

    def measure(self, built: Built) -> Trial:
        return built.trial

    def recall(self, trial: Trial) -> None:
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
    ("trials", "seconds", "limit"),
    [
        (4, None, "its limit of 4 builds"),
        (60, 3.0, "its limit of 3.0 s"),
        (60, 90.0, "its limit of 1 min 30 s"),
        (6, None, ""),  # exactly the number of proposals
        (0, None, "its limit of 0 builds"),
        (60, 0.0, "its limit of 0.0 s"),
    ],
)
def test_the_search_reports_the_limit_that_ended_it(trials: int, seconds: float | None, limit: str) -> None:
    """The reference is built for any budget."""
    clock = iter(range(10_000))
    deadline = Deadline(seconds=seconds, clock=lambda: (seconds or 1.0) / 3 * next(clock))
    search = search_of(Script(NAMES), Contest(), deadline=deadline, trials=trials)
    assert names_of(search.run())[0] == "reference"
    assert search.ended_by == limit
    assert len(search.trials) == 1 or (trials and seconds != 0)


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


@pytest.mark.parametrize(("phase", "subgraph"), [("isolated", ("n",)), ("confirm", ())])
def test_results_of_subgraphs_and_of_confirmations_are_not_replayed_as_trials(
    phase: str, subgraph: tuple[str, ...]
) -> None:
    """A placement may be proposed for a subgraph and for the whole model."""
    contest = Contest()
    other = Trial(number=2, phase=phase, placement=placement("b"), ratio=0.5, subgraph=subgraph)
    trials, _ = run(contest, replay=[*journal("reference", "a"), other])
    assert contest.built == ["b", "c", "d", "e"]
    assert trials[2].ratio != 0.5
    assert not any(trial.subgraph for trial in trials)


def test_time_for_confirmation_builds_is_reserved_once_a_candidate_has_won() -> None:
    deadline, left = Deadline(seconds=40.0, clock=lambda: 0.0), list[float | None]()
    contest = Contest()
    contest.seconds = 2.0
    search = search_of(Script(NAMES), contest, deadline=deadline, confirming=5)
    for _ in search:
        left.append(deadline.left)
    assert left[:2] == [40.0, 30.0]


# ---- resumed searches of all strategies ---------------------------------------------------------------


MOST = {"optuna": 12}  # trials of strategies that take tens of milliseconds for each proposal


class Device(Contest):
    """A contest without measurements: an oracle computes results, and a third of the builds fails.

    The task metric of a placement grows with its SQNR, unevenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.space = small_space()
        self.limits, self.truth = limited(least_score=0.8), Additive(self.space)
        self._oracle = Oracle(
            self.space, 3, fails=lambda placement: int(placement.digest, 16) % 3 == 0, eps=0.02
        )

    def build(self, number: int, proposal: Proposal) -> Built:
        self.built.append(f"{proposal.placement.digest} {proposal.subgraph}")
        best = self._oracle._best
        answer = self._oracle.answer(proposal)
        trial = replace(answer, number=number, subgraph=proposal.subgraph, eps=None)
        if trial.ok and not trial.subgraph and trial.placement.sites:
            sqnr_db = self.truth.truth(trial.placement)
            score = min(1.0, (sqnr_db + int(trial.placement.digest[:4], 16) / 0x7FFF) / 50)
            trial = replace(trial, sqnr_db=sqnr_db, accuracy=score)
        self.limits.learn(trial)
        if proposal.subgraph or not proposal.timed or not self.limits.admits(trial.placement):
            self._oracle._best = best
            trial = replace(trial, incumbent=False)
        self.best = trial.ratio if trial.incumbent else self.best
        return Built(trial)

    def recall(self, trial: Trial) -> None:
        self._oracle._number += 1
        self.limits.learn(trial)
        if trial.incumbent:
            self.best, self._oracle._best = trial.ratio, self._oracle.cost(trial.placement)

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        self.eps = 0.02
        return NOISE


class Log(list[Trial]):
    """A journal whose trials are serialized and parsed as in the real one."""

    def append(self, trial: Trial) -> None:
        super().append(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))


def searched(
    strategy: str, replay: Sequence[Trial] = (), *, at_once: bool = False
) -> tuple[Search, Device, Log]:
    device, log = Device(), Log()
    trials = MOST.get(strategy, 24)
    setup = SearchSetup(space=device.space, trials=trials, limits=device.limits, accuracy=device.truth)
    made = resolve("strategy", strategy)(setup, np.random.default_rng(5))
    search = Search(made, device, Deadline(), log, case="case", most_trials=trials, replay=replay)  # type: ignore[arg-type] # implements the part of a contest that a search uses
    if at_once:
        search.resume()
    search.run()
    return search, device, log


@pytest.mark.parametrize("at_once", [False, True], ids=["as asked", "at once"])
@pytest.mark.parametrize("strategy", names("strategy"))
def test_a_resumed_search_has_the_trials_of_an_uninterrupted_one(strategy: str, at_once: bool) -> None:
    whole, device, log = searched(strategy)
    assert len(device.built) > 3
    for cut in range(1, len(log) + 1):
        again, resumed, added = searched(strategy, log[:cut], at_once=at_once)
        assert again.trials == whole.trials
        assert [*log[:cut], *added] == log
        assert resumed.built == device.built[len(device.built) - len(resumed.built) :]
        assert len(resumed.built) + sum(t.phase != "noise" for t in log[:cut]) == len(device.built)
