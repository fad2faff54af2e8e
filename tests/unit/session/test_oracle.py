"""The oracle of a search predicts the SQNR of builds, learns offsets from them, and returns nothing if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.accuracy.gate import FIRST_DOUBT_DB, MOST_DOUBT_DB, SAMPLES, Evaluator
from qdqspec.accuracy.rehearsal import Rehearsal, RehearsedEngine, Sensitivities, find_sensitivities
from qdqspec.app.session import Session
from qdqspec.app.session.oracle import RehearsalOracle
from qdqspec.app.session.rehearser import Rehearser
from qdqspec.backends._open_engines import Engines
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.errors import BackendError
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Case, Inputs, Placement, Trial, TuneRules

TEXT = """<ir_version: 8, opset_import: ["": 17]> net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  y = Conv<pads = [1, 1, 1, 1]>(b, w) }"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    proto, lots = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    weights = lots.normal(0, 0.3, (4, 4, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=lots.normal(size=(4, 4, 8, 8)).astype(np.float32))
    with Session(backend="fake", root=tmp_path, no_cache=True) as opened:
        yield opened


@pytest.fixture
def case(tmp_path: Path) -> Case:
    data = Inputs(calibration=tmp_path / "data.npz")
    return Case(id="default", model=tmp_path / "net.onnx", inputs=data, tune=TuneRules(trials=12))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def opened(session: Session, case: Case, notes: list[str]) -> Iterator[tuple[RehearsalOracle, SchemeSpace]]:
    bench = session.work(case).prepared
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        yield RehearsalOracle(rehearser, bench.space, notes.append), bench.space


def trial(placement: Placement, sqnr_db: float, **more: float) -> Trial:
    return Trial(number=1, phase="pure", placement=placement, sqnr_db=sqnr_db, **more)  # type: ignore[arg-type] # keyword arguments are numbers


def test_the_predicted_sqnr_decreases_with_more_pairs(opened: tuple[RehearsalOracle, SchemeSpace]) -> None:
    oracle, space = opened
    noise = oracle.noise()
    assert noise is not None
    assert all(power > 0 for power in noise.values())
    first = space.units[0]
    alone = oracle.predicted_db(space.resolve({first.id: first.full}))
    everything = oracle.predicted_db(space.resolve(space.everything()))
    assert alone is not None
    assert everything is not None
    assert everything < alone < oracle.predicted_db(space.resolve({}))  # type: ignore[operator] # not None


def test_predictions_include_the_offset_of_builds_and_the_difference_of_all_data(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    everything = space.resolve(space.everything())
    rehearsed = oracle.predicted_db(everything)
    assert rehearsed is not None
    assert oracle.doubt_db == FIRST_DOUBT_DB
    oracle.learn(trial(everything, rehearsed - 2))
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 1)  # half of the offset of one build
    oracle.difference.learn(rehearsed - 2, rehearsed - 3, everything)
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 2)
    assert "measured" in oracle.text(everything)


def test_two_builds_with_opposite_errors_do_not_exclude_what_is_near_the_limit(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    for unit, error in zip(space.units[:2], (-8.0, 8.0), strict=True):
        placement = space.resolve({unit.id: unit.full})
        rehearsed = oracle.rehearsed_db(placement)
        assert rehearsed is not None
        oracle.learn(trial(placement, rehearsed + error))
    assert oracle.doubt_db == MOST_DOUBT_DB


def count_runs(rehearsal: Rehearsal, counted: list[int]) -> None:
    """Append to ``counted`` for each run of a rehearsal."""

    def watched(engines: Engines) -> Engines:
        run = engines._run_on
        engines._run_on = lambda *each: counted.append(1) or run(*each)  # type: ignore[method-assign,func-returns-value] # a counter
        return engines

    load = rehearsal.load
    rehearsal.load = lambda *each: watched(load(*each))  # type: ignore[method-assign] # those of single placements
    watched(rehearsal._engines)


def test_an_outlier_among_builds_does_not_change_the_offset(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    placements = [space.resolve({unit.id: unit.full}) for unit in space.units[:3]]
    for placement, residual in zip(placements, (-5.4, -0.2, 0.1), strict=False):
        rehearsed = oracle.rehearsed_db(placement)
        assert rehearsed is not None
        oracle.learn(trial(placement, rehearsed + residual))
    assert oracle.built.at(rehearsed) == pytest.approx(-0.2, abs=0.25)


def test_placements_whose_difference_is_known_to_be_small_are_not_rehearsed_on_all_data(
    session: Session, case: Case, tmp_path: Path
) -> None:
    write_data(tmp_path, further=1.0)
    with everything_on_few_samples(session, case) as (rehearser, space, everything, few_db):
        counted: list[int] = []
        count_runs(rehearser.rehearsal, counted)
        for difference_db, is_enough in ((0.5, True), (3.0, False)):
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=few_db - 2)
            oracle.difference.learn(few_db - 20, few_db - 20 - difference_db, space.resolve({}))
            counted.clear()
            assert oracle.predicted_db(everything) is not None
            assert (len(counted) <= 1 + 2 * SAMPLES) == is_enough


@contextmanager
def everything_on_few_samples(
    session: Session, case: Case
) -> Iterator[tuple[Rehearser, SchemeSpace, Placement, float]]:
    """The rehearsal of a case, and everything quantized with its SQNR on the few samples."""
    bench = session.work(case).prepared
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        space = bench.space
        everything = space.resolve(space.everything())
        few_db = RehearsalOracle(rehearser, space, lambda _: None).predicted_db(everything)
        assert few_db is not None
        yield rehearser, space, everything, few_db


def write_data(folder: Path, *, further: float) -> None:
    """Write data of 40 samples, of which those after the first few have less signal for the same noise."""
    data = np.random.default_rng(0).normal(size=(40, 4, 8, 8)).astype(np.float32)
    data[SAMPLES:] *= further
    np.savez(folder / "data.npz", x=data)


def test_placements_near_the_limit_are_rehearsed_on_all_data(
    session: Session, case: Case, tmp_path: Path
) -> None:
    write_data(tmp_path, further=0.5)
    with everything_on_few_samples(session, case) as (rehearser, space, everything, few_db):
        runs = rehearser.rehearsal
        feeds = list(runs.subject.feeds())
        truth = Evaluator(feeds, lambda: RehearsedEngine(runs, space.resolve({})), len(feeds))
        some = space.resolve(dict(list(space.everything().items())[1:]))
        for placement in (everything, some):  # the first few samples are not representative
            truth_db = truth(RehearsedEngine(runs, placement))
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=truth_db + 0.2)
            assert oracle.predicted_db(placement) == pytest.approx(truth_db)
        assert truth(RehearsedEngine(runs, everything)) < few_db - 1
        short = RehearsalOracle(rehearser, space, lambda _: None, lambda: 1e-4, least_db=few_db)
        assert short.predicted_db(everything) == pytest.approx(few_db)


def test_a_difference_of_another_sqnr_does_not_refuse_what_meets_the_limit_on_the_few_samples(
    session: Session, case: Case, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 4, 8, 8)).astype(np.float32))
    with everything_on_few_samples(session, case) as (rehearser, space, everything, few_db):
        oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=few_db - 1)
        oracle.difference.learn(few_db + 25, few_db + 10, space.resolve({}))
        assert oracle.predicted_db(everything) == pytest.approx(few_db, abs=1.0)


def test_failed_builds_do_not_change_predictions(opened: tuple[RehearsalOracle, SchemeSpace]) -> None:
    oracle, space = opened
    first, second = (space.resolve({unit.id: unit.full}) for unit in space.units[:2])
    oracle.learn(trial(first, 3.0))
    twin = oracle.predicted_db(second)
    oracle.learn(replace(trial(second, 3.0), status="failed"))
    assert oracle.predicted_db(second) == twin


def test_an_oracle_without_enough_memory_returns_nothing_with_a_note(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqspec.accuracy.rehearsal.rehearsal.bytes_left", lambda: 16)
    oracle, space = opened
    assert oracle.predicted_db(space.resolve(space.everything())) is None
    assert oracle.noise() is None
    assert len(notes) == 1
    assert "the search measures the accuracy of placements by building them" in notes[0]


@pytest.mark.parametrize(("seconds", "known"), [(1e-6, False), (1e6, True)])
def test_sensitivities_that_take_too_much_time_are_skipped(
    session: Session, case: Case, notes: list[str], seconds: float, known: bool
) -> None:
    bench = session.work(case).prepared
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        oracle = RehearsalOracle(rehearser, bench.space, notes.append, lambda: seconds)
        assert (oracle.noise() is not None) == known
        assert ["was skipped: raise the time limit" in note for note in notes] == [True] * (not known)


def test_placements_are_predicted_even_if_the_noise_of_labels_cannot_be_measured(
    session: Session, case: Case, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = session.work(case).prepared
    with Rehearser(setup, setup.comparison_data()) as rehearser:
        space = setup.space
        oracle = RehearsalOracle(rehearser, space, notes.append)
        predicted = oracle.predicted_db(space.resolve(space.everything()))

        def failing(*_: object, **__: object) -> None:
            raise BackendError("the runtime could not build a part")

        monkeypatch.setattr("qdqspec.app.session.oracle.find_sensitivities", failing)
        assert oracle.noise() is None
        first, *_ = space.units
        assert oracle.predicted_db(space.resolve({first.id: first.full})) is not None
        assert predicted == oracle.predicted_db(space.resolve(space.everything()))
    assert notes == [
        "the error of each Q/DQ pair alone could not be measured: the runtime could not build a part"
    ]


def test_neighbouring_pairs_are_measured_together_if_each_alone_takes_too_long(
    session: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = session.work(case).prepared
    asked: list[tuple[int, int]] = []

    def watched(rehearsal: Rehearsal, *, samples: int, together: int) -> Sensitivities:
        asked.append((samples, together))
        return find_sensitivities(rehearsal, samples=samples, together=together)

    monkeypatch.setattr("qdqspec.app.session.oracle.find_sensitivities", watched)
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        space, switches = bench.space, len(rehearser.rehearsal.switches)
        everything = space.resolve(space.everything())
        for seconds_a_switch, expected in ((1e3, (SAMPLES, 1)), (1.0, (1, 1)), (0.3, (1, 3))):
            oracle = RehearsalOracle(rehearser, space, lambda _: None)
            assert oracle.predicted_db(everything) is not None
            seconds = seconds_a_switch * rehearser.rehearsal.run_seconds * switches
            assert oracle.block_errors(seconds)[0]
            assert asked[-1] == expected


def test_no_placement_is_rehearsed_after_the_time_limit(session: Session, case: Case) -> None:
    bench = session.work(case).prepared
    left = 1e6
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        space = bench.space
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


def test_most_builds_of_a_search_meet_its_sqnr_limit(
    session: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(FakeDevice().capabilities(), computes=True)  # enables the oracle on the simulated device
    monkeypatch.setattr(FakeDevice, "capabilities", lambda *_: able)
    bench = session.work(case).prepared
    with Rehearser(bench, bench.comparison_data()) as rehearser:
        oracle = RehearsalOracle(rehearser, bench.space, lambda _: None)
        everything = oracle.predicted_db(bench.space.resolve(bench.space.everything()))
    assert everything is not None
    limit = everything + 1
    result = session.search(replace(case, tune=replace(case.tune, min_sqnr_db=limit)))
    built = [t for t in result.trials if t.placement.sites and t.phase != "confirm"]
    assert built
    assert "sensitivity" not in {t.phase for t in built}
    assert sum(t.sqnr_db is not None and t.sqnr_db < limit for t in built) <= len(built) / 5
