"""The oracle of a search predicts the SQNR of builds, learns offsets from them, and returns nothing if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.accuracy.oracle import FIRST_DOUBT_DB, MOST_DOUBT_DB, RehearsalOracle, Rehearser
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.errors import BackendError
from qdqspec.measurement.engines import Engines
from qdqspec.parity.gate import KNOWN, SAMPLES, AllData
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.rehearsal import Rehearsal, RehearsedEngine, quick_runs
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
        run = engines._timed
        engines._timed = lambda *each: counted.append(1) or run(*each)  # type: ignore[method-assign,func-returns-value] # a counter
        return engines

    load = rehearsal.load
    rehearsal.load = lambda *each: watched(load(*each))  # type: ignore[method-assign] # those of single placements
    watched(rehearsal._engines)


def test_predictions_far_from_the_limit_use_few_samples_and_do_not_set_the_offset(
    session: Session, case: Case
) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        everything = space.resolve(space.everything())
        whole = RehearsalOracle(rehearser, space, lambda _: None)
        known = whole.predicted_db(everything)
        assert known is not None
        runs = rehearser.rehearsal
        counted: list[int] = []
        count_runs(runs, counted)
        for limit, samples in ((known, 4), (known - 20, 4), (known + 20, 2)):
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=limit)
            oracle.predicted_db(space.resolve({}))
            counted.clear()
            predicted = oracle.predicted_db(everything)
            assert predicted == pytest.approx(known, abs=4)
            assert len(counted) - 4 == samples  # the reference has four runs
            oracle.learn(trial(everything, known - 3))
            assert oracle.offset_db(known) == pytest.approx(-1.5 if samples == 4 else 0)


def test_an_outlier_among_builds_does_not_change_the_offset(
    opened: tuple[RehearsalOracle, SchemeSpace],
) -> None:
    oracle, space = opened
    placements = [space.resolve({unit.id: unit.full}) for unit in space.units[:3]]
    for placement, residual in zip(placements, (-5.4, -0.2, 0.1), strict=False):
        rehearsed = oracle.rehearsed_db(placement)
        assert rehearsed is not None
        oracle.learn(trial(placement, rehearsed + residual))
    assert oracle.offset_db(rehearsed) == pytest.approx(-0.2, abs=0.25)


@contextmanager
def everything_on_few_samples(
    session: Session, case: Case
) -> Iterator[tuple[Rehearser, SchemeSpace, Placement, float]]:
    """The rehearsal of a case, and everything quantized with its SQNR on the few samples."""
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
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
        float_model = RehearsedEngine(runs, space.resolve({}))
        truth = AllData(list(runs.subject.feeds()), lambda: float_model)
        some = space.resolve(dict(list(space.everything().items())[1:]))
        for placement in (everything, some):  # the first few samples are not representative
            truth_db = truth(RehearsedEngine(runs, placement))
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=truth_db + 0.2)
            assert oracle.predicted_db(placement) == pytest.approx(truth_db)
        assert truth(RehearsedEngine(runs, everything)) < few_db - 1
        short = RehearsalOracle(rehearser, space, lambda _: None, lambda: 1e-4, least_db=few_db)
        assert short.predicted_db(everything) == pytest.approx(few_db)


def test_the_float_outputs_of_builds_are_not_rehearsed_again(
    session: Session, case: Case, tmp_path: Path
) -> None:
    write_data(tmp_path, further=0.05)
    with everything_on_few_samples(session, case) as (rehearser, space, everything, few_db):
        runs = rehearser.rehearsal
        feeds = list(runs.subject.feeds())

        def predicted_db(reference: Placement | None) -> float:
            """The SQNR of everything on all data, compared with builds of a reference, if there is one."""
            made = None if reference is None else AllData(feeds, lambda: RehearsedEngine(runs, reference))
            oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=few_db, measured=made)
            found = oracle.predicted_db(everything)
            assert found is not None
            return found

        assert predicted_db(space.resolve({})) == pytest.approx(predicted_db(None))
        assert predicted_db(everything) > few_db + 20  # of itself


def test_placements_above_the_limit_but_near_it_are_rehearsed_on_all_data_too(
    session: Session, case: Case, tmp_path: Path
) -> None:
    """The first samples do not show that a placement meets the limit where all data differs from them."""
    write_data(tmp_path, further=0.05)
    with everything_on_few_samples(session, case) as (rehearser, space, _, _):
        some = space.resolve(dict(list(space.everything().items())[1:]))
        few_db = RehearsalOracle(rehearser, space, lambda _: None).rehearsed_db(some)
        assert few_db is not None
        oracle = RehearsalOracle(rehearser, space, lambda _: None, least_db=few_db - 12)
        assert oracle.predicted_db(space.resolve({space.units[0].id: space.units[0].full})) is not None
        assert oracle._gate is not None
        for known in oracle._gate._differences.values():
            known += [1.0] * KNOWN  # as of engines that were run before: the first samples may be enough
        oracle.difference.learn(few_db - 12, few_db - 18, space.resolve({}))
        runs = rehearser.rehearsal
        float_model = RehearsedEngine(runs, space.resolve({}))
        truth_db = AllData(list(runs.subject.feeds()), lambda: float_model)(RehearsedEngine(runs, some))
        assert truth_db < few_db - 1
        assert oracle.predicted_db(some) == pytest.approx(truth_db)


@contextmanager
def counted_runs(session: Session, case: Case, data: np.ndarray) -> Iterator[_Counted]:
    """Placements of a case with this data, fewest dB first, and the runs of their rehearsal."""
    np.savez(case.model.with_name("data.npz"), x=data)
    with everything_on_few_samples(session, case) as (rehearser, space, everything, few_db):
        units = dict(space.everything())
        less = [
            space.resolve({unit: label for unit, label in units.items() if unit != left})
            for left in list(units)[:2]
        ]
        few = RehearsalOracle(rehearser, space, lambda _: None)
        known = {placement: few.rehearsed_db(placement) or 0.0 for placement in less}
        counted: list[int] = []
        count_runs(rehearser.rehearsal, counted)
        yield _Counted(
            rehearser,
            space,
            [(everything, few_db), *sorted(known.items(), key=lambda each: each[1])],
            counted,
        )


@dataclass(frozen=True)
class _Counted:
    rehearser: Rehearser
    space: SchemeSpace
    placements: list[tuple[Placement, float]]
    runs: list[int]

    def of(self, oracle: RehearsalOracle, placement: Placement) -> int:
        """The runs that a prediction takes, with those of the reference."""
        before = len(self.runs)
        oracle.predicted_db(placement)
        return len(self.runs) - before


def test_placements_below_the_limit_are_not_rehearsed_on_all_data_if_it_differs_less(
    session: Session, case: Case
) -> None:
    data = np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype(np.float32)
    alike = data * np.linspace(0.99, 1.0, 40, dtype=np.float32).reshape(-1, 1, 1, 1)
    with counted_runs(session, case, alike) as counted:
        (lower, lower_db), (higher, higher_db), *_ = counted.placements
        assert lower_db < higher_db - 1
        oracle = RehearsalOracle(counted.rehearser, counted.space, lambda _: None, least_db=higher_db + 0.8)
        # 16 of the 40 samples decide; the reference runs on those that are not among the first few
        assert 8 + 8 + 16 + 8 <= counted.of(oracle, higher) < 60
        assert counted.of(oracle, lower) < 16


def test_placements_above_the_limit_are_rehearsed_on_all_data_if_it_differs_more(
    session: Session, case: Case
) -> None:
    data = np.random.default_rng(0).normal(size=(40, 4, 8, 8)).astype(np.float32)
    with counted_runs(session, case, data) as counted:
        (first, first_db), (second, second_db), *_ = counted.placements
        near = RehearsalOracle(counted.rehearser, counted.space, lambda _: None, least_db=second_db - 2)
        near.difference.learn(first_db, first_db - 1.4, first)
        assert near.difference.is_small
        assert counted.of(near, second) > 40
        far = RehearsalOracle(counted.rehearser, counted.space, lambda _: None, least_db=second_db - 3.5)
        far.difference.learn(first_db, first_db - 1.4, first)
        assert counted.of(far, second) < 24


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
    monkeypatch.setattr("qdqspec.rehearsal.rehearsal.bytes_left", lambda: 16)
    oracle, space = opened
    assert oracle.predicted_db(space.resolve(space.everything())) is None
    assert oracle.noise() is None
    assert len(notes) == 1
    assert "the search measures the accuracy of placements by building them" in notes[0]


@pytest.mark.parametrize(("seconds", "known"), [(1e-6, False), (1e6, True)])
def test_sensitivities_that_take_too_much_time_are_skipped(
    session: Session, case: Case, notes: list[str], seconds: float, known: bool
) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        oracle = RehearsalOracle(rehearser, bench.prepared.space, notes.append, lambda: seconds)
        assert (oracle.noise() is not None) == known
        assert ["was skipped: raise the time limit" in note for note in notes] == [True] * (not known)


def test_placements_are_predicted_even_if_the_noise_of_labels_cannot_be_measured(
    session: Session, case: Case, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = session.work(case).setup
    left = 1e6
    with Rehearser(setup.prepared, setup.resources, setup.prepared.comparison_data()) as rehearser:
        space = setup.prepared.space
        oracle = RehearsalOracle(rehearser, space, notes.append, lambda: left)
        predicted = oracle.predicted_db(space.resolve(space.everything()))
        left = 2.5 * rehearser.rehearsal.run_seconds * quick_runs(rehearser.rehearsal)
        rough, left = oracle.rough_noise({}), 1e6

        def failing(*_: object, **__: object) -> None:
            raise BackendError("the runtime could not build a part")

        monkeypatch.setattr("qdqspec.accuracy.oracle.find_sensitivities", failing)
        assert rough is not None
        assert oracle.noise() == rough  # rough noise is known
        first, *_ = space.units
        assert oracle.predicted_db(space.resolve({first.id: first.full})) is not None
        assert predicted == oracle.predicted_db(space.resolve(space.everything()))
    assert notes == [
        "the error of each Q/DQ pair alone could not be measured: the runtime could not build a part"
    ]


def test_rough_noise_of_the_units_with_most_time_is_measured_alone(session: Session, case: Case) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space, switches = bench.prepared.space, rehearser.rehearsal.switches
        oracle = RehearsalOracle(rehearser, space, lambda _: None)
        own = {
            unit.id: {n for site in space.resolve({unit.id: unit.full}).sites for n in switches.numbers(site)}
            for unit in space.units
        }
        first, second = own
        for spent, longest in (({second: 5.0}, second), ({first: 5.0, second: 2.0}, first), ({}, first)):
            assert oracle._of_longest(rehearser.rehearsal, spent, len(own[longest])) == own[longest]
        assert oracle._of_longest(rehearser.rehearsal, {}, 0) == set()
        assert oracle._of_longest(rehearser.rehearsal, {}, 100) == own[first] | own[second]


def test_rough_noise_is_measured_if_the_noise_of_each_pair_takes_too_long(
    session: Session, case: Case
) -> None:
    bench = session.work(case).setup
    left: float | None = None
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        oracle = RehearsalOracle(rehearser, space, lambda _: None, lambda: left)
        assert oracle.rough_noise({}) is None  # no time limit
        left = 1e6
        assert oracle.rough_noise({}) is None  # enough time for the noise of each pair
        left = 2.5 * rehearser.rehearsal.run_seconds * quick_runs(rehearser.rehearsal)
        rough = oracle.rough_noise({})
        assert rough is not None
        assert {power for power in rough.values() if power > 0}
        left = 1e6
        exact = oracle.noise()
        assert exact is not None
        assert rough.keys() == exact.keys()
        assert oracle.rough_noise({}) is None  # the exact noise is known


def test_no_placement_is_rehearsed_after_the_time_limit(session: Session, case: Case) -> None:
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
        errors, missing = oracle.block_errors(1e6)  # after the search, with a separate time limit
        assert errors
        assert not missing


def test_runs_of_a_rough_prediction_are_reused(session: Session, case: Case) -> None:
    bench = session.work(case).setup
    with Rehearser(bench.prepared, bench.resources, bench.prepared.comparison_data()) as rehearser:
        space = bench.prepared.space
        everything, counted = space.resolve(space.everything()), []
        runs = rehearser.rehearsal
        count_runs(runs, counted)
        oracle = RehearsalOracle(rehearser, space, lambda _: None, metric=SimpleNamespace())  # type: ignore[arg-type] # any object
        rough = oracle.roughly_db(everything)
        assert len(counted) == 4 + 2  # all samples of the reference, two of the placement
        assert rough == pytest.approx(oracle.predicted_db(everything), abs=3)
        assert len(counted) == 4 + 4


def test_most_builds_of_a_search_meet_its_sqnr_limit(
    session: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(FakeDevice().capabilities(), computes=True)  # enables the oracle on the simulated device
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
