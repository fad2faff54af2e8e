"""The search of a case as a whole: corrections before the loop, the time left, resume, and repairs after the loop."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_cases import digits_case

from qdqspec.accuracy.corrections.find import FoundCorrections
from qdqspec.app.session import Session
from qdqspec.app.session.tuning import named, trials_of
from qdqspec.search.base import Proposal
from qdqspec.search.loop import Built, Contest
from qdqspec.testing.strategies import small_space
from qdqspec.types import CORRECTIONS, AccuracyRules, Case, Placement, QuantizeRules, Samples, TuneRules

pytestmark = pytest.mark.usefixtures("fast_integers")


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    rules = QuantizeRules(corrections=CORRECTIONS)  # sought at each limit
    return digits_case(models, tmp_path, 16, quantize=rules, tune=TuneRules(trials=3))


def state_of(contest: Contest) -> tuple[object, ...]:
    """The state before a build: the noise of builds, the incumbent, graphs built before, and accuracies."""
    return deepcopy(
        (
            contest.eps,
            (contest._incumbent.digest, contest.best),
            contest._seen.keys() - {""},
            contest.limits.known,
            contest.limits.difference,
        )
    )


@pytest.mark.parametrize(
    "rules",
    [{"min_sqnr_db": 40.0}, {"accuracy": AccuracyRules(metric="top1", max_drop=0.02)}],
    ids=["binding SQNR", "metric"],
)
def test_a_search_resumed_after_any_trial_has_the_same_state_and_next_build(
    case: Case, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """The figures of accuracy that decide are restored too."""
    evaluation = models.parent / "data" / "digits_evaluation.npz"
    inputs = replace(case.inputs, evaluation=evaluation)
    case = replace(case, inputs=inputs, tune=TuneRules(trials=4, **rules))
    monkeypatch.setattr("qdqspec.app.preparation.prepare.find_case_corrections", lambda _: FoundCorrections())
    build, built = Contest.build, list[tuple[int, tuple[object, ...]]]()

    def noted(self: Contest, number: int, proposal: Proposal) -> Built:
        written = journal.read_bytes().count(b"\n") if journal.exists() else 0
        built.append((written, (proposal.phase, proposal.placement.digest, *state_of(self))))
        return build(self, number, proposal)

    def steady(self: Contest, *_: object) -> Samples:
        self.eps = 0.02
        return Samples()

    def stopped(self: Contest, number: int, proposal: Proposal) -> None:
        stops.append((proposal.phase, proposal.placement.digest, *state_of(self)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Contest, "measure_variation", steady)
    with Session(root=tmp_path, no_cache=True) as session, monkeypatch.context() as patched:
        journal = session.output(case) / "trials.jsonl"
        patched.setattr(Contest, "build", noted)
        session.search(case)
    text = journal.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(Contest, "build", stopped)
    for cut in range(2, built[-1][0] + 1):
        journal.write_bytes(b"".join(text[:cut]))
        expected, stops = next(known for written, known in built if written >= cut), list[Any]()
        with Session(root=tmp_path, no_cache=True) as session, pytest.raises(KeyboardInterrupt):
            session.search(case)
        assert stops == [expected]


def test_near_misses_of_the_limit_are_repaired_after_the_search(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def repaired(trials, limits, oracle, space) -> Iterator[Placement]:  # type: ignore[no-untyped-def] # as in `search.repair`
        asked.append(limits.min_sqnr_db)
        yield space.resolve(space.everything())

    monkeypatch.setattr("qdqspec.app.session.tuning.repaired", repaired)
    with Session(root=tmp_path) as session:
        search = session.search(replace(case, tune=TuneRules(trials=1, min_sqnr_db=15.0)))
    assert asked == [15.0]
    assert [trial.phase for trial in search.trials] == ["pure", "repair"]


def test_with_a_time_limit_a_search_may_build_more_unless_it_has_a_number_of_builds() -> None:
    space, make = small_space(), named(TuneRules().strategy)
    untimed, timed = (trials_of(TuneRules(minutes=minutes), space, make) for minutes in (None, 1.0))
    assert timed > untimed
    assert trials_of(TuneRules(minutes=1.0, trials=7), space, make) == 7
