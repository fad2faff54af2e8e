"""A search of any strategy, stopped after any trial and resumed, proposes the same and builds nothing twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from searches import Additive, limited

from qdqspec._core.deadline import Deadline
from qdqspec._core.registry import names, resolve
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.loop import Built, Search
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import Samples, Trial

MOST = {"optuna": 12}  # trials of strategies that take tens of milliseconds for each proposal


class Device:
    """A contest without measurements: an oracle computes results, and a third of the builds fails.

    The task metric of a placement grows with its SQNR, unevenly.
    """

    def __init__(self) -> None:
        self.space = small_space()
        self.limits, self.truth = limited(least_score=0.8), Additive(self.space)
        self.eps = 0.01
        self.best: float | None = None
        self.built: list[tuple[str, tuple[str, ...]]] = []
        self._oracle = Oracle(
            self.space, 3, fails=lambda placement: int(placement.digest, 16) % 3 == 0, eps=0.02
        )

    def build(self, number: int, proposal: Proposal) -> Built:
        self.built.append((proposal.placement.digest, proposal.subgraph))
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

    def measure(self, built: Built) -> Trial:
        return built.trial

    def recall(self, trial: Trial) -> None:
        self._oracle._number += 1
        self.limits.learn(trial)
        if trial.incumbent:
            self.best, self._oracle._best = trial.ratio, self._oracle.cost(trial.placement)

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        self.eps = 0.02
        return Samples(wall_ms=(1.0, 1.1), cpu_ms=(1.0, 1.1))


class Log(list[Trial]):
    """A journal whose trials are serialized and parsed as in the real one."""

    def append(self, trial: Trial) -> None:
        super().append(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))


def searched(
    strategy: str, replay: Sequence[Trial] = (), *, at_once: bool = False
) -> tuple[Search, Device, Log]:
    device, log = Device(), Log()
    trials = MOST.get(strategy, 24)
    setup = SearchSetup(
        space=device.space, clock="cpu", trials=trials, limits=device.limits, accuracy=device.truth
    )
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
