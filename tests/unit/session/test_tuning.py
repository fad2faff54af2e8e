"""The search of a case as a whole, and the oracle that predicts the SQNR of builds and learns offsets from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import Open
from written_cases import digits_case

from qdqspec._core.arrays import Array
from qdqspec._core.registry import resolve
from qdqspec.accuracy.corrections.find import FoundCorrections
from qdqspec.accuracy.evaluator import Offset
from qdqspec.accuracy.predict import RehearsalOracle, RehearsedMetric, Rehearser
from qdqspec.app.session import Session
from qdqspec.app.session.tuning import rehearser_of, trials_of
from qdqspec.errors import BackendError
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.base import Proposal
from qdqspec.search.loop import Built, Contest
from qdqspec.testing.strategies import small_space
from qdqspec.types import (
    CORRECTIONS,
    AccuracyRules,
    Case,
    Placement,
    QuantizeRules,
    Samples,
    Trial,
    TuneRules,
)


@pytest.fixture
def digits(models: Path, tmp_path: Path) -> Case:
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


@pytest.mark.usefixtures("fast_integers")
@pytest.mark.parametrize(
    "rules",
    [{"min_sqnr_db": 40.0}, {"accuracy": AccuracyRules(metric="top1", max_drop=0.02)}],
    ids=["binding SQNR", "metric"],
)
def test_a_search_resumed_after_any_trial_has_the_same_state_and_next_build(
    digits: Case, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """The figures of accuracy that decide are restored too."""
    evaluation = models.parent / "data" / "digits_evaluation.npz"
    inputs = replace(digits.inputs, evaluation=evaluation)
    digits = replace(digits, inputs=inputs, tune=TuneRules(trials=4, **rules))
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
        journal = session.output(digits) / "trials.jsonl"
        patched.setattr(Contest, "build", noted)
        session.search(digits)
    text = journal.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(Contest, "build", stopped)
    for cut in range(2, built[-1][0] + 1):
        journal.write_bytes(b"".join(text[:cut]))
        expected, stops = next(known for written, known in built if written >= cut), list[Any]()
        with Session(root=tmp_path, no_cache=True) as session, pytest.raises(KeyboardInterrupt):
            session.search(digits)
        assert stops == [expected]


def test_with_a_time_limit_a_search_may_build_more_unless_it_has_a_number_of_builds() -> None:
    space, make = small_space(), resolve("strategy", TuneRules().strategy)
    untimed, timed = (trials_of(TuneRules(minutes=minutes), space, make) for minutes in (None, 1.0))
    assert timed > untimed
    assert trials_of(TuneRules(minutes=1.0, trials=7), space, make) == 7


# ---- the oracle -----------------------------------------------------------------------------------


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def rehearsing(open_session: Open, case: Case) -> Iterator[tuple[Rehearser, SchemeSpace]]:
    bench = open_session().work(case).prepared
    with rehearser_of(bench, bench.data.for_comparison()) as rehearser:
        yield rehearser, bench.space


@pytest.fixture
def opened(
    rehearsing: tuple[Rehearser, SchemeSpace], notes: list[str]
) -> tuple[RehearsalOracle, SchemeSpace]:
    return RehearsalOracle(rehearsing[0], notes.append), rehearsing[1]


def trial(placement: Placement, sqnr_db: float, **more: float) -> Trial:
    return Trial(number=1, phase="pure", placement=placement, sqnr_db=sqnr_db, **more)  # type: ignore[arg-type] # keyword arguments are numbers


def test_predictions_include_the_offset_of_builds_and_the_difference_of_all_data(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    everything = space.resolve(space.everything())
    rehearsed = oracle.predicted_db(everything)
    assert oracle.predicted_db(replace(everything, given=True)) is None, "it has numbers of its own"
    assert oracle.doubt_db == Offset().first_doubt_db
    oracle.learn(trial(everything, rehearsed - 2))
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 1)  # half of the offset of one build
    oracle.difference.learn(rehearsed - 2, rehearsed - 3, everything)
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 2)


def test_an_oracle_without_enough_memory_returns_nothing_with_a_note(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqspec.accuracy.rehearsal.bytes_left", lambda: 16)
    oracle, space = opened
    assert oracle.predicted_db(space.resolve(space.everything())) is None
    assert oracle.noise() is None
    (note,) = notes
    assert "the search measures the accuracy of placements by building them" in note


@pytest.mark.parametrize(("seconds", "known"), [(1e-6, False), (1e6, True)])
def test_sensitivities_that_take_too_much_time_are_skipped(
    rehearsing: tuple[Rehearser, SchemeSpace], notes: list[str], seconds: float, known: bool
) -> None:
    oracle = RehearsalOracle(rehearsing[0], notes.append, lambda: seconds)
    assert (oracle.noise() is not None) == known
    assert ["was skipped: raise the time limit" in note for note in notes] == [True] * (not known)


def test_placements_are_predicted_even_if_the_noise_of_labels_cannot_be_measured(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise BackendError("the runtime could not build a part")

    monkeypatch.setattr("qdqspec.accuracy.predict.find_sensitivities", failing)
    oracle, space = opened
    assert oracle.noise() is None
    assert oracle.predicted_db(space.resolve(space.everything())) is not None
    assert notes == [
        "the error of each Q/DQ pair alone could not be measured: the runtime could not build a part"
    ]


def test_no_placement_is_rehearsed_after_the_time_limit(rehearsing: tuple[Rehearser, SchemeSpace]) -> None:
    left, (rehearser, space) = 1e6, rehearsing
    oracle = RehearsalOracle(rehearser, lambda _: None, lambda: left)
    everything, first = space.resolve(space.everything()), space.units[0]
    known = oracle.predicted_db(everything)
    left = 0.0
    assert oracle.predicted_db(everything) == known
    assert oracle.predicted_db(space.resolve({first.id: first.full})) is None
    assert oracle.noise() is None
    errors, missing = oracle.block_errors(1e6)  # after the search, with a separate time limit
    assert errors
    assert not missing


@pytest.mark.parametrize(("lost", "kept"), [(0.0, True), (0.5, False)])
def test_the_metric_of_a_placement_is_expected_as_rehearsed_with_the_loss_of_builds(
    open_session: Open, case: Case, project: Path, lost: float, kept: bool
) -> None:
    def size(outputs: Mapping[str, Array], labels: Array) -> float:
        return float(np.abs(outputs["y"]).mean())

    inputs = replace(case.inputs, evaluation=project / "data.npz")
    prepared = open_session().work(replace(case, inputs=inputs, metrics={"size": size})).prepared
    space, scores = prepared.space, prepared.scores
    everything = space.everything()
    some = dict(list(everything.items())[1:])  # with less noise: its loss applies to both
    reference = scores.of_reference("size", None).value
    with rehearser_of(prepared, prepared.data.for_comparison()) as rehearser:
        placed = [space.resolve(each) for each in (some, everything)]
        values = [scores.of_engine(rehearser.rehearsal.engine(each), "size", None).value for each in placed]
        rules = AccuracyRules(metric="size", min=min(values) - 0.1)
        oracle = RehearsalOracle(rehearser, [].append, metric=RehearsedMetric(scores, rules, reference))
        assert oracle.keeps_metric(placed[0]) is True
        db = oracle.predicted_db(placed[0])
        assert db is not None
        oracle.learn(trial(placed[0], db, accuracy=values[0] - lost))
        assert oracle.keeps_metric(placed[1]) is kept
        assert ("and not built: 1 rehearsed placement" in oracle.refused_text) is not kept
