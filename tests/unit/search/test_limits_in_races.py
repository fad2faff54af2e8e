"""The accuracy constraint in races: a race winner is scored once, and rejected if it does not meet the limit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.types import Placement, SearchLimits
from tests.support.lab import NO_LIMITS, QUIET, REFERENCE, Candidate, Lab, MakeLab, placement, started

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


def test_a_race_winner_is_scored_once_and_after_its_races(make_lab: MakeLab) -> None:
    scored: list[str] = []
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of(scored))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.incumbent, trial.accuracy, trial.sqnr_db) == (True, 0.95, 30.0)
    assert trial.race.verdict == "faster"
    assert scored == ["good"]  # the reference was scored before
    assert lab.built.count("good") == 2  # as for any race winner


def test_a_race_winner_that_is_not_accurate_enough_is_rejected(make_lab: MakeLab) -> None:
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of())
    trial = bench.trial(1, placement("bad"), "p")
    assert (trial.ok, trial.incumbent, trial.accuracy) == (True, False, 0.5)
    assert trial.race.verdict == "faster"
    assert trial.ratio == pytest.approx(0.5, rel=0.05)
    assert bench.best == 1.0
    assert [engine.name for engine in lab.open] == ["reference"]
    assert bench.trial(2, placement("good"), "p").incumbent
    assert bench.best == pytest.approx(0.8, rel=0.05)
    assert bench.trial(3, placement("faster"), "p").race.opponent == placement("good").digest


def test_a_candidate_with_twice_the_error_of_a_rejected_one_is_neither_raced_nor_scored(
    make_lab: MakeLab,
) -> None:
    scored: list[str] = []
    bench = started(lab_of(make_lab), limits=limits_of(scored))
    bench.trial(1, placement("bad"), "p")
    trial = bench.trial(2, placement("worse"), "p")
    assert (trial.race, trial.incumbent, trial.accuracy) == (None, False, None)
    assert trial.ratio == pytest.approx(0.45, rel=0.05)
    assert scored == ["bad"]


def test_scores_of_an_earlier_run_are_reused(make_lab: MakeLab) -> None:
    first = started(lab_of(make_lab), limits=limits_of())
    trials = [first.trial(number, placement(name), "p") for number, name in enumerate(("bad", "good"), 1)]
    scored: list[str] = []
    found = limits_of(scored)
    bench = started(lab_of(make_lab), limits=found)
    for trial in trials:
        bench.recall(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))
    assert bench.best == pytest.approx(0.8, rel=0.05)
    assert {digest: each.score for digest, each in found.known.items()} == {
        REFERENCE.digest: 1.0,
        placement("bad").digest: 0.5,
        placement("good").digest: 0.95,
    }
    assert found.scored == ([30.0], [20.0])
    assert [bench.admits(placement(name)) for name in ("good", "bad")] == [True, False]
    assert scored == []


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


def test_a_race_winner_below_the_limit_on_all_data_is_rejected(make_lab: MakeLab) -> None:
    bench = started(lab_of(make_lab), limits=on_all_data(Data(-3.0)))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.sqnr_db, trial.all_data_db, trial.incumbent) == (27.0, 24.0, False)
    assert trial_from_json(json.loads(json.dumps(trial_to_json(trial)))).all_data_db == 24.0


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
    resumed.learn(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))
    assert (resumed.difference.at(25.0), resumed.is_known(placement("good"))) == (0.0, False)
    assert not bench.admits(placement("good"))
    assert data.read == ["good"]


@pytest.mark.parametrize(("difference", "measured"), [(-1.5, False), (-3.0, True)])
def test_with_a_large_difference_every_candidate_near_the_limit_is_measured_on_all_data(
    make_lab: MakeLab, *, difference: float, measured: bool
) -> None:
    bench = started(lab_of(make_lab), limits=on_all_data(Data(difference)))
    assert bench.trial(1, placement("good"), "p").all_data_db is not None
    assert (bench.trial(2, placement("bad"), "p").all_data_db is not None) == measured
