"""The limits of a search: in races, which score a winner once, and the SQNR that a metric needs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.types import Placement, SearchLimits, Trial
from tests.support.lab import NO_LIMITS, QUIET, Candidate, Lab, MakeLab, placement, started

LEAST = 0.9
SQNR = {"reference": 200.0, "good": 30.0, "bad": 20.0, "worse": 16.0, "faster": 28.0}
SCORES = {"reference": 1.0, "good": 0.95, "bad": 0.5, "worse": 0.4, "faster": 0.92}


def limits_of(scored: list[str] | None = None) -> Limits:
    """Limits with scores by names of candidates; ``scored`` gets the names of those that were scored."""

    def score(engine) -> float:
        if scored is not None:
            scored.append(engine.name)
        return SCORES[engine.name]

    return Limits(
        asked=NO_LIMITS,
        first_samples=lambda engine: SQNR[engine.name],
        metric=MetricLimit(least=LEAST, score=score),
        confirms_sqnr=False,
    )


def lab_of(make: MakeLab, **more: Candidate) -> Lab:
    speeds = {"good": 0.8, "bad": 0.5, "worse": 0.45, "faster": 0.6}
    return make(QUIET, **{name: Candidate(scale=scale) for name, scale in speeds.items()}, **more)


def written(trial: Trial) -> Trial:
    """The trial as read from a journal."""
    return trial_from_json(json.loads(json.dumps(trial_to_json(trial))))


def test_a_race_winner_is_scored_once_and_rejected_if_it_is_not_accurate_enough(make_lab: MakeLab) -> None:
    """The reference was scored before."""
    scored: list[str] = []
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of(scored))
    trial = bench.trial(1, placement("bad"), "p")
    assert (trial.ok, trial.incumbent, trial.accuracy) == (True, False, 0.5)
    assert trial.race.verdict == "faster"
    assert trial.ratio == pytest.approx(0.5, rel=0.05)
    assert bench.best == 1.0
    assert [engine.name for engine in lab.open] == ["reference"]
    good = bench.trial(3, placement("good"), "p")
    assert (good.incumbent, good.accuracy, good.sqnr_db) == (True, 0.95, 30.0)
    assert scored == ["bad", "good"]
    assert lab.built.count("good") == 1  # a clear gain is not raced again
    assert bench.best == pytest.approx(0.8, rel=0.05)
    faster = bench.trial(4, placement("faster"), "p")
    assert (faster.incumbent, faster.race.opponent) == (True, placement("good").digest)
    assert faster.race.ratio == pytest.approx(0.75)
    assert faster.ratio == bench.best == pytest.approx(0.6)


def test_the_selected_candidate_is_scored_once(make_lab: MakeLab) -> None:
    scored: list[str] = []
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of(scored))
    assert bench.admits(placement("good"))
    assert not bench.admits(placement("bad"))
    assert bench.admits(placement("good"))
    assert bench.admits(Placement(sites=frozenset()))
    assert scored == ["good", "bad"]
    assert [engine.name for engine in lab.open] == ["reference"]


FEW = {"reference": 200.0, "good": 27.0, "bad": 24.0, "worse": 16.0, "faster": 26.0}


@dataclass
class Data:
    """The SQNR on all data is that on the few samples plus a difference; that on a part of it adds ``part``."""

    difference: float
    part: float | None = None
    read: list[str] = field(default_factory=list)

    def __call__(self, engine) -> float:
        self.read.append(engine.name)
        return FEW[engine.name] + self.difference

    def near(self, engine, limit_db: float) -> tuple[float, bool]:
        return (self(engine), True) if self.part is None else (FEW[engine.name] + self.part, False)


def on_all_data(data: Data) -> Limits:
    """A limit of 25 dB on all data."""
    asked = SearchLimits(min_sqnr_db=25.0)
    return Limits(asked=asked, first_samples=lambda engine: FEW[engine.name], all_data=data)


def test_a_placement_below_the_limit_on_the_few_samples_is_not_run_on_all_data(make_lab: MakeLab) -> None:
    """All data may be many samples of a slow model: a placement from outside the search is first run on a few."""
    data = Data(0.0)
    bench = started(lab_of(make_lab), limits=on_all_data(data))
    assert not bench.admits(placement("bad"))
    assert data.read == []
    assert bench.admits(placement("good"))
    assert data.read == ["good"]


def test_races_are_decided_on_a_part_of_all_data_and_the_selection_on_all(make_lab: MakeLab) -> None:
    data = Data(-3.0, part=-1.0)  # 26 dB on the part, 24 on all data
    bench = started(lab_of(make_lab), limits=on_all_data(data))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.all_data_db, trial.is_part, trial.incumbent) == (26.0, True, True)
    assert data.read == []
    resumed = on_all_data(Data(0.0))
    resumed.learn(written(trial))
    assert (resumed.difference.at(25.0), resumed.is_known(placement("good"))) == (0.0, False)
    assert not bench.admits(placement("good"))
    assert data.read == ["good"]


@pytest.mark.parametrize(("difference", "is_large"), [(-1.5, False), (-3.0, True)])
def test_with_a_large_difference_every_candidate_near_the_limit_is_measured_on_all_data(
    make_lab: MakeLab, *, difference: float, is_large: bool
) -> None:
    """A race winner below the limit on all data is rejected."""
    bench = started(lab_of(make_lab), limits=on_all_data(Data(difference)))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.sqnr_db, trial.all_data_db, trial.incumbent) == (27.0, 27.0 + difference, not is_large)
    assert written(trial).all_data_db == trial.all_data_db
    assert (bench.trial(2, placement("bad"), "p").all_data_db is not None) == is_large


# ---- the SQNR that the metric needs -------------------------------------------------------------------


STEP_DB = 5.0


def bar(**scores: float) -> Limits:
    """Limits after candidates: ``bar(db20=0.9)`` is one of 20 dB with a score of 0.9, where 0.5 is accepted."""
    metric = MetricLimit(least=0.5)
    found = Limits(asked=NO_LIMITS, metric=metric, step_db=STEP_DB)
    for name, score in scores.items():
        found.learn(_trial(float(name.removeprefix("db")), score))
    return found


def _trial(sqnr_db: float, score: float) -> Trial:
    """A trial of a placement of its own for each SQNR."""
    return Trial(number=1, phase="p", placement=placement(str(sqnr_db)), sqnr_db=sqnr_db, accuracy=score)


def test_a_higher_sqnr_is_proposed_after_a_rejection_at_most_the_middle_to_an_accepted_one() -> None:
    assert bar(db10=0.1).aim_db == 10 + STEP_DB
    assert bar(db10=0.1, db15=0.2).aim_db == 15 + STEP_DB
    assert bar(db10=0.1, db16=0.9).aim_db == 13
    assert bar(db10=0.1, db40=0.9).aim_db == 10 + STEP_DB  # the increase is limited to one step


def test_a_rehearsal_changes_the_aim() -> None:
    found = bar(db40=0.9)
    found.rehearse(placement("30"), 30.0, kept=False)
    assert (found.scored.missed_db, found.aim_db) == (30, 35)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_build_replaces_the_rehearsal_of_its_placement(*, is_first: bool) -> None:
    found, built = bar(), _trial(16.0, 0.1)
    if is_first:
        found.learn(built)
    found.rehearse(built.placement, 18.0, kept=True)
    if not is_first:
        assert found.scored[0] == [18]
        found.learn(built)
    assert found.scored == ([], [16])


@given(st.lists(st.tuples(st.floats(-50, 100, allow_subnormal=False), st.booleans()), max_size=8))
def test_the_next_sqnr_is_above_the_rejected(results) -> None:
    found = bar()
    for sqnr_db, good in results:
        found.learn(_trial(sqnr_db, 1.0 if good else 0.0))
    if found.aim_db is not None:
        assert math.isfinite(found.aim_db)
        assert found.aim_db > found.scored.missed_db
