"""The oracle of a search predicts the SQNR of builds, learns offsets from them, and returns nothing if it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chains import SHAPE

from qdqspec._core.arrays import Array
from qdqspec.accuracy.evaluator import SAMPLES, Evaluator, Offset
from qdqspec.accuracy.rehearsal import RehearsedEngine
from qdqspec.app.session import Session
from qdqspec.app.session.oracle import RehearsalOracle, RehearsedMetric, Rehearser
from qdqspec.errors import BackendError
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.limits import MetricLimit
from qdqspec.types import AccuracyRules, Case, Placement, Trial


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(backend="fake", root=tmp_path, no_cache=True) as opened:
        yield opened


@pytest.fixture
def notes() -> list[str]:
    return []


@contextmanager
def rehearser_of(session: Session, case: Case) -> Iterator[tuple[Rehearser, SchemeSpace]]:
    bench = session.work(case).prepared
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        yield rehearser, bench.space


@pytest.fixture
def opened(session: Session, case: Case, notes: list[str]) -> Iterator[tuple[RehearsalOracle, SchemeSpace]]:
    with rehearser_of(session, case) as (rehearser, space):
        yield RehearsalOracle(rehearser, space, notes.append), space


def trial(placement: Placement, sqnr_db: float, **more: float) -> Trial:
    return Trial(number=1, phase="pure", placement=placement, sqnr_db=sqnr_db, **more)  # type: ignore[arg-type] # keyword arguments are numbers


def test_predictions_include_the_offset_of_builds_and_the_difference_of_all_data(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    everything = space.resolve(space.everything())
    rehearsed = oracle.predicted_db(everything)
    assert rehearsed is not None
    assert oracle.doubt_db == Offset().first_doubt_db
    oracle.learn(trial(everything, rehearsed - 2))
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 1)  # half of the offset of one build
    oracle.difference.learn(rehearsed - 2, rehearsed - 3, everything)
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 2)


def test_near_the_limit_all_data_is_rehearsed(session: Session, case: Case, project: Path) -> None:
    """The samples after the first few have less signal for the same noise."""
    data = np.random.default_rng(0).normal(size=(40, *SHAPE[1:])).astype(np.float32)
    data[SAMPLES:] *= 0.5
    np.savez(project / "data.npz", x=data)
    with rehearser_of(session, case) as (rehearser, space):
        runs, everything = rehearser.rehearsal, space.resolve(space.everything())
        few_db = RehearsalOracle(rehearser, space, lambda _: None).predicted_db(everything)
        feeds = list(runs.subject.feeds())
        truth = Evaluator(feeds, lambda: RehearsedEngine(runs, space.resolve({})), len(feeds))
        some = space.resolve(dict(list(space.everything().items())[1:]))
        for placement in (everything, some):
            truth_db = truth(RehearsedEngine(runs, placement))
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=truth_db + 0.2)
            assert oracle.predicted_db(placement) == pytest.approx(truth_db)
        assert truth(RehearsedEngine(runs, everything)) < few_db - 1
        short = RehearsalOracle(rehearser, space, lambda _: None, lambda: 1e-4, least_db=few_db)
        assert short.predicted_db(everything) == pytest.approx(few_db)


def test_an_oracle_without_enough_memory_returns_nothing_with_a_note(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqspec.accuracy.rehearsal.bytes_left", lambda: 16)
    oracle, space = opened
    assert oracle.predicted_db(space.resolve(space.everything())) is None
    assert oracle.noise() is None
    assert len(notes) == 1
    assert "the search measures the accuracy of placements by building them" in notes[0]


@pytest.mark.parametrize(("seconds", "known"), [(1e-6, False), (1e6, True)])
def test_sensitivities_that_take_too_much_time_are_skipped(
    session: Session, case: Case, notes: list[str], seconds: float, known: bool
) -> None:
    with rehearser_of(session, case) as (rehearser, space):
        oracle = RehearsalOracle(rehearser, space, notes.append, lambda: seconds)
        assert (oracle.noise() is not None) == known
        assert ["was skipped: raise the time limit" in note for note in notes] == [True] * (not known)


def test_placements_are_predicted_even_if_the_noise_of_labels_cannot_be_measured(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise BackendError("the runtime could not build a part")

    monkeypatch.setattr("qdqspec.app.session.oracle.find_sensitivities", failing)
    oracle, space = opened
    assert oracle.noise() is None
    assert oracle.predicted_db(space.resolve(space.everything())) is not None
    assert notes == [
        "the error of each Q/DQ pair alone could not be measured: the runtime could not build a part"
    ]


def test_no_placement_is_rehearsed_after_the_time_limit(session: Session, case: Case) -> None:
    left = 1e6
    with rehearser_of(session, case) as (rehearser, space):
        oracle = RehearsalOracle(rehearser, space, lambda _: None, lambda: left)
        everything, first = space.resolve(space.everything()), space.units[0]
        known = oracle.predicted_db(everything)
        left = 0.0
        assert oracle.predicted_db(everything) == known
        assert oracle.predicted_db(space.resolve({first.id: first.full})) is None
        assert oracle.noise() is None
        errors, missing = oracle.block_errors(1e6)  # after the search, with a separate time limit
        assert errors
        assert not missing


def test_a_model_as_it_was_given_is_not_rehearsed(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str]
) -> None:
    """Its numbers are its own, and it may have pairs that the space has no numbers for."""
    oracle, space = opened
    everything = space.resolve(space.everything())
    assert oracle.predicted_db(replace(everything, given=True)) is None
    assert oracle.predicted_db(everything) is not None
    assert not notes


@pytest.mark.parametrize(("lost", "kept"), [(0.0, True), (0.5, False)])
def test_the_metric_of_a_placement_is_expected_as_rehearsed_with_the_loss_of_builds(
    session: Session, case: Case, project: Path, lost: float, kept: bool
) -> None:
    def size(outputs: Mapping[str, Array], labels: Array) -> float:
        return float(np.abs(outputs["y"]).mean())

    inputs = replace(case.inputs, evaluation=project / "data.npz")
    prepared = session.work(replace(case, inputs=inputs, metrics={"size": size})).prepared
    space, scores = prepared.space, prepared.scores
    everything = space.everything()
    some = dict(list(everything.items())[1:])  # with less noise: its loss applies to both
    reference = scores.of_reference("size", None).value
    with Rehearser(prepared, prepared.comparison_data()) as rehearser:
        placed = [space.resolve(each) for each in (some, everything)]
        values = [scores.of_engine(rehearser.rehearsal.engine(each), "size", None).value for each in placed]
        rules, least = AccuracyRules(metric="size", min=0.0), min(values) - 0.1
        limit = MetricLimit(least=least, rules=rules, reference=reference, samples=4, score=lambda _: 0.0)
        oracle = RehearsalOracle(rehearser, space, [].append, metric=RehearsedMetric(scores, limit))
        assert oracle.keeps_metric(placed[0]) is True
        db = oracle.predicted_db(placed[0])
        assert db is not None
        oracle.learn(trial(placed[0], db, accuracy=values[0] - lost))
        assert oracle.keeps_metric(placed[1]) is kept
        assert ("and not built: 1 rehearsed placement" in oracle.refused_text) is not kept
