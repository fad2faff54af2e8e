"""The oracle of a search: predicts what the gate measures, learns what is beyond it, and is silent where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.accuracy.oracle import FIRST_DOUBT_DB, RehearsalOracle, Rehearser
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.errors import BackendError
from qdqspec.parity.gate import AllData
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.rehearsal import RehearsedEngine, quick_runs
from qdqspec.session import Session
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
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        yield RehearsalOracle(rehearser, bench.prepared.space, notes.append), bench.prepared.space


def trial(placement: Placement, sqnr_db: float, **more: float) -> Trial:
    return Trial(number=1, phase="pure", placement=placement, sqnr_db=sqnr_db, **more)  # type: ignore[arg-type] # numbers


def test_more_pairs_make_more_noise_and_none_make_none(opened: tuple[RehearsalOracle, SchemeSpace]) -> None:
    oracle, space = opened
    noise = oracle.noise()
    assert noise is not None
    assert all(power > 0 for power in noise.values())
    first = space.units[0]
    alone = oracle.predicted_db(space.resolve({first.id: first.full}))
    everything = oracle.predicted_db(space.resolve(space.everything()))
    assert alone is not None
    assert everything is not None
    assert everything < alone < oracle.predicted_db(space.resolve({}))  # type: ignore[operator] # it is known


def test_the_offset_of_builds_and_the_difference_of_all_data_are_added(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    everything = space.resolve(space.everything())
    rehearsed = oracle.predicted_db(everything)
    assert rehearsed is not None
    assert oracle.doubt_db == FIRST_DOUBT_DB
    oracle.learn(trial(everything, rehearsed - 2))
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 1)  # half of what one build shows
    oracle.difference.learn(rehearsed - 2, rehearsed - 3)
    assert oracle.predicted_db(everything) == pytest.approx(rehearsed - 2)
    assert "measured" in oracle.text(everything)


def test_far_from_the_limit_few_samples_decide_and_teach_nothing(session: Session, case: Case) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        everything = space.resolve(space.everything())
        whole = RehearsalOracle(rehearser, space, lambda _: None)
        known = whole.predicted_db(everything)
        assert known is not None
        runs = rehearser.rehearsal
        counted: list[int] = []
        outputs = runs.outputs
        runs.outputs = lambda placement, feed: counted.append(1) or outputs(placement, feed)  # type: ignore[method-assign,func-returns-value] # counts
        for limit, samples in ((known, 4), (known - 20, 4), (known + 20, 2)):
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=limit)
            oracle.predicted_db(space.resolve({}))
            counted.clear()
            predicted = oracle.predicted_db(everything)
            assert predicted == pytest.approx(known, abs=4)
            assert len(counted) - 4 == samples  # four of the reference
            oracle.learn(trial(everything, known - 3))
            assert oracle.offset_db(known) == pytest.approx(-1.5 if samples == 4 else 0)


def test_one_odd_build_among_several_does_not_move_the_offset(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    placements = [space.resolve({unit.id: unit.full}) for unit in space.units[:3]]
    for placement, residual in zip(placements, (-5.4, -0.2, 0.1), strict=False):
        rehearsed = oracle.rehearsed_db(placement)
        assert rehearsed is not None
        oracle.learn(trial(placement, rehearsed + residual))
    assert oracle.offset_db(rehearsed) == pytest.approx(-0.2, abs=0.25)


def test_placements_near_the_limit_are_rehearsed_on_all_data_where_the_few_samples_mislead(
    session: Session, case: Case, tmp_path: Path
) -> None:
    lots = np.random.default_rng(0)
    data = lots.normal(size=(40, 4, 8, 8)).astype(np.float32)
    data[8:] *= 0.05  # the few samples come first: those after them have less signal for the same noise
    np.savez(tmp_path / "data.npz", x=data)
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        everything = space.resolve(space.everything())
        few_db = RehearsalOracle(rehearser, space, lambda _: None).predicted_db(everything)
        assert few_db is not None
        oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=few_db)
        all_data_db = oracle.predicted_db(everything)
        assert all_data_db is not None
        assert all_data_db < few_db - 1
        some = space.resolve(dict(list(space.everything().items())[1:]))
        runs = rehearser.rehearsal
        float_model = RehearsedEngine(runs, space.resolve({}))
        truth_db = AllData(list(runs.subject.feeds()), lambda: float_model)(RehearsedEngine(runs, some))
        assert oracle.predicted_db(some) == pytest.approx(truth_db)  # the few samples mislead: no estimate
        short = RehearsalOracle(rehearser, space, lambda _: None, lambda: 1e-4, least_db=few_db)
        assert short.predicted_db(everything) == pytest.approx(few_db)


def test_what_was_not_rehearsed_teaches_nothing(opened: tuple[RehearsalOracle, SchemeSpace]) -> None:
    oracle, space = opened
    first, second = (space.resolve({unit.id: unit.full}) for unit in space.units[:2])
    oracle.learn(trial(first, 3.0))
    twin = oracle.predicted_db(second)
    oracle.learn(replace(trial(second, 3.0), status="failed"))
    assert oracle.predicted_db(second) == twin


def test_without_enough_memory_it_answers_nothing_and_the_reason_is_noted(
    opened: tuple[RehearsalOracle, SchemeSpace], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqspec.rehearsal.rehearsal.bytes_left", lambda: 16)
    oracle, space = opened
    assert oracle.predicted_db(space.resolve(space.everything())) is None
    assert oracle.noise() is None
    assert len(notes) == 1
    assert "the search measures the accuracy of placements by building them" in notes[0]


@pytest.mark.parametrize(("seconds", "known"), [(1e-6, False), (1e6, True)])
def test_sensitivities_that_take_too_much_of_a_search_are_skipped(
    session: Session, case: Case, notes: list[str], seconds: float, known: bool
) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        oracle = RehearsalOracle(rehearser, bench.prepared.space, notes.append, lambda: seconds)
        assert (oracle.noise() is not None) == known
        assert ["was skipped: raise the time limit" in note for note in notes] == [True] * (not known)


def test_where_labels_alone_cannot_be_measured_placements_are_still_predicted(
    session: Session, case: Case, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = session.work(case).setup
    left = 1e6
    with Rehearser(setup.prepared, setup.resources, setup.prepared.comparison_data()) as rehearser:
        space = setup.prepared.space
        oracle = RehearsalOracle(rehearser, space, notes.append, lambda: left)
        predicted = oracle.predicted_db(space.resolve(space.everything()))
        left = 2.5 * oracle._outputs.run_seconds * quick_runs(rehearser.rehearsal)
        rough, left = oracle.rough_noise(), 1e6

        def failing(*_: object, **__: object) -> None:
            raise BackendError("the runtime could not build a part")

        monkeypatch.setattr("qdqspec.accuracy.oracle.find_sensitivities", failing)
        assert rough is not None
        assert oracle.noise() == rough  # that of neighbours is known
        first, *_ = space.units
        assert oracle.predicted_db(space.resolve({first.id: first.full})) is not None
        assert predicted == oracle.predicted_db(space.resolve(space.everything()))
    assert notes == [
        "the error of each Q/DQ pair alone could not be measured: the runtime could not build a part"
    ]


def test_rough_noise_is_measured_where_that_of_each_pair_would_take_long(
    session: Session, case: Case
) -> None:
    bench = session.work(case).setup
    left: float | None = None
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        oracle = RehearsalOracle(rehearser, space, lambda _: None, lambda: left)
        assert oracle.rough_noise() is None  # there is no limit
        left = 1e6
        assert oracle.rough_noise() is None  # that of each pair is no matter
        left = 2.5 * oracle._outputs.run_seconds * quick_runs(rehearser.rehearsal)
        rough = oracle.rough_noise()
        assert rough is not None
        assert {power for power in rough.values() if power > 0}
        left = 1e6
        exact = oracle.noise()
        assert exact is not None
        assert rough.keys() == exact.keys()
        assert oracle.rough_noise() is None  # better is known


def test_once_the_time_is_over_nothing_new_is_rehearsed(session: Session, case: Case) -> None:
    bench = session.work(case).setup
    left = 1e6
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        oracle = RehearsalOracle(rehearser, space, lambda _: None, lambda: left)
        everything, first = space.resolve(space.everything()), space.units[0]
        known = oracle.predicted_db(everything)
        left = 0.0
        assert oracle.predicted_db(everything) == known
        assert oracle.predicted_db(space.resolve({first.id: first.full})) is None
        assert oracle.noise() is None
        errors, missing = oracle.block_errors(1e6)  # after the search, within a time of its own
        assert errors
        assert not missing


def test_runs_of_a_rough_judgement_are_not_repeated(session: Session, case: Case) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        everything, counted = space.resolve(space.everything()), []
        runs = rehearser.rehearsal
        outputs = runs.outputs
        runs.outputs = lambda placement, feed: counted.append(1) or outputs(placement, feed)  # type: ignore[method-assign,func-returns-value] # counts
        oracle = RehearsalOracle(rehearser, space, lambda _: None, metric=SimpleNamespace())  # type: ignore[arg-type] # any
        rough = oracle.roughly_db(everything)
        assert len(counted) == 4 + 2  # all of the reference, two of the placement
        assert rough == pytest.approx(oracle.predicted_db(everything), abs=3)
        assert len(counted) == 4 + 4


def test_a_search_under_a_limit_builds_what_keeps_it(
    session: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(FakeDevice().capabilities(), computes=True)  # the simulated device has no oracle otherwise
    monkeypatch.setattr(FakeDevice, "capabilities", lambda *_: able)
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        oracle = RehearsalOracle(rehearser, bench.prepared.space, lambda _: None)
        everything = oracle.predicted_db(bench.prepared.space.resolve(bench.prepared.space.everything()))
    assert everything is not None
    limit = everything + 1
    result = session.search(replace(case, tune=replace(case.tune, min_sqnr_db=limit)))
    built = [t for t in result.trials if t.placement.sites and t.phase != "confirm"]
    assert built
    assert "sensitivity" not in {t.phase for t in built}
    assert sum(t.sqnr_db is not None and t.sqnr_db < limit for t in built) <= len(built) / 5
