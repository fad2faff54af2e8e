"""The accuracy constraint in races: a race winner is scored once, and rejected if it does not meet the limit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qdqspec.errors import BackendError
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.types import Placement, SearchLimits
from tests.support.lab import QUIET, REFERENCE, Candidate, Lab, MakeLab, lab_in, placement, started

LEAST = 0.9
SQNR = {"reference": 200.0, "good": 30.0, "bad": 20.0, "worse": 16.0, "faster": 28.0}
SCORES = {"reference": 1.0, "good": 0.95, "bad": 0.5, "worse": 0.4, "faster": 0.92}


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    return lab_in(tmp_path)


def sqnr_db(engine) -> float:
    return SQNR[engine.name]


def limits_of(scored: list[str] | None = None, *, min_sqnr_db: float | None = None, **more) -> Limits:
    """Limits with scores by names of candidates; ``scored`` gets the names of those that were scored."""

    def score(engine) -> float:
        if scored is not None:
            scored.append(engine.name)
        return SCORES[engine.name]

    return Limits(
        **{
            "asked": SearchLimits(min_sqnr_db=min_sqnr_db),
            "first_samples": sqnr_db,
            "metric": MetricLimit(least=LEAST, score=score),
            "confirms_sqnr": False,
            **more,
        }
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
    assert trial.race is not None
    assert trial.race.verdict == "faster"
    assert scored == ["good"]  # the reference was scored before
    assert lab.built.count("good") == 2  # as for any race winner


def test_a_race_winner_that_is_not_accurate_enough_is_rejected(make_lab: MakeLab) -> None:
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of())
    trial = bench.trial(1, placement("bad"), "p")
    assert (trial.ok, trial.incumbent, trial.accuracy) == (True, False, 0.5)
    assert trial.race is not None
    assert trial.race.verdict == "faster"
    assert trial.ratio == pytest.approx(0.5, rel=0.05)
    assert bench.best == 1.0
    assert [engine.name for engine in lab.open] == ["reference"]
    assert bench.trial(2, placement("good"), "p").incumbent
    assert bench.best == pytest.approx(0.8, rel=0.05)


def test_the_incumbent_is_unchanged_after_a_rejected_race_winner(make_lab: MakeLab) -> None:
    bench = started(lab_of(make_lab), limits=limits_of())
    bench.trial(1, placement("good"), "p")
    bench.trial(2, placement("bad"), "p")
    assert bench.best == pytest.approx(0.8, rel=0.05)
    assert bench.trial(3, placement("faster"), "p").race.opponent == placement("good").digest


def test_candidates_that_lose_a_race_are_not_scored(make_lab: MakeLab) -> None:
    scored: list[str] = []
    bench = started(
        lab_of(make_lab, slow=Candidate(scale=2.0)), limits=limits_of(scored, first_samples=lambda _: 9.0)
    )
    assert bench.trial(1, placement("slow"), "p").accuracy is None
    assert scored == []


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


def test_an_exception_in_the_metric_fails_the_trial_and_keeps_the_incumbent(make_lab: MakeLab) -> None:
    def score(engine) -> float:
        raise BackendError("metric 'mine' gave nan for this candidate")

    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of(metric=MetricLimit(least=LEAST, score=score)))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.status, trial.error) == ("failed", "metric 'mine' gave nan for this candidate")
    assert bench.best == 1.0
    assert [engine.name for engine in lab.open] == ["reference"]


def test_the_reference_is_the_incumbent_at_any_score(make_lab: MakeLab) -> None:
    found = limits_of(metric=MetricLimit(least=LEAST, reference=0.1))
    bench = started(lab_of(make_lab), limits=found)
    assert bench.best == 1.0
    assert not found.has_missed_metric


def test_a_minimum_sqnr_applies_in_addition_to_a_metric(make_lab: MakeLab) -> None:
    bench = started(lab_of(make_lab), limits=limits_of(min_sqnr_db=35.0))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.race, trial.incumbent) == (None, False)


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


def test_without_a_metric_every_candidate_is_admitted(make_lab: MakeLab) -> None:
    lab = lab_of(make_lab)
    bench = started(lab, limits=limits_of(metric=None))
    assert bench.admits(placement("bad"))
    assert lab.built == ["reference"]
    assert bench.trial(1, placement("bad"), "p").incumbent


def test_the_same_graph_has_the_same_score(make_lab: MakeLab) -> None:
    lab = lab_of(make_lab, twin=Candidate(scale=0.8, graph="g"))
    lab.candidates["good"].graph = "g"
    bench = started(lab, limits=limits_of(first_samples=lambda _: 30.0))
    bench.trial(1, placement("good"), "p")
    assert bench.trial(2, placement("twin"), "p").accuracy == 0.95


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


def on_all_data(difference: float, **more) -> Limits:
    """A limit of 25 dB; the SQNR on all data is that on the few samples plus a difference."""
    return Limits(
        **{
            "asked": SearchLimits(min_sqnr_db=25.0),
            "first_samples": lambda engine: FEW[engine.name],
            "all_data": Data(difference),
            **more,
        }
    )


def test_a_race_winner_below_the_limit_on_all_data_is_rejected(make_lab: MakeLab) -> None:
    bench = started(lab_of(make_lab), limits=on_all_data(-3.0))
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.sqnr_db, trial.all_data_db, trial.incumbent) == (27.0, 24.0, False)
    assert trial_from_json(json.loads(json.dumps(trial_to_json(trial)))).all_data_db == 24.0


def test_a_placement_below_the_limit_on_the_few_samples_is_not_run_on_all_data(make_lab: MakeLab) -> None:
    """All data may be many samples of a slow model: a placement from outside the search is first run on a few."""
    data = Data(0.0)
    bench = started(lab_of(make_lab), limits=on_all_data(0.0, all_data=data))
    assert not bench.admits(placement("bad"))
    assert data.read == []
    assert bench.admits(placement("good"))
    assert data.read == ["good"]


def test_races_are_decided_on_a_part_of_all_data_and_the_selection_on_all(make_lab: MakeLab) -> None:
    data = Data(-3.0, part=-1.0)  # 26 dB on the part, 24 on all data
    accuracy = on_all_data(0.0, all_data=data)
    bench = started(lab_of(make_lab), limits=accuracy)
    trial = bench.trial(1, placement("good"), "p")
    assert (trial.all_data_db, trial.is_part, trial.incumbent) == (26.0, True, True)
    assert data.read == []
    resumed = on_all_data(0.0)
    resumed.learn(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))
    assert (resumed.difference.at(25.0), resumed.is_known(placement("good"))) == (0.0, False)
    assert not bench.admits(placement("good"))
    assert data.read == ["good"]


def test_the_difference_of_all_data_is_estimated_from_the_first_candidate_near_the_limit(
    make_lab: MakeLab,
) -> None:
    accuracy = on_all_data(2.0)
    bench = started(lab_of(make_lab), limits=accuracy)
    assert bench.trial(1, placement("bad"), "p").incumbent  # 24 dB on the first samples, 26 on all
    assert accuracy.difference.at(20.0) == 2.0
    assert bench.trial(2, placement("worse"), "p").race is None


@pytest.mark.parametrize(("difference", "measured"), [(-1.5, False), (-3.0, True)])
def test_with_a_large_difference_every_candidate_near_the_limit_is_measured_on_all_data(
    make_lab: MakeLab, *, difference: float, measured: bool
) -> None:
    bench = started(lab_of(make_lab), limits=on_all_data(difference))
    assert bench.trial(1, placement("good"), "p").all_data_db is not None
    assert (bench.trial(2, placement("bad"), "p").all_data_db is not None) == measured


def test_a_resumed_search_has_the_difference_of_the_first_run(make_lab: MakeLab) -> None:
    bench = started(lab_of(make_lab), limits=on_all_data(-1.0))
    known = bench.trial(1, placement("good"), "p")
    accuracy = on_all_data(-1.0)
    accuracy.learn(known)
    assert accuracy.difference.at(20.0) == -1.0
    assert accuracy.is_known(placement("good"))


def test_a_candidate_rehearsed_on_all_data_is_measured_on_it_only_if_it_wins(make_lab: MakeLab) -> None:
    data = Data(-3.0)
    accuracy = on_all_data(-3.0, all_data=data)
    accuracy.difference.learn(30.0, 28.5, placement("good"))
    accuracy.difference.learn(27.0, 24.5, placement("bad"))
    bench = started(lab_of(make_lab), limits=accuracy)
    assert bench.trial(1, placement("bad"), "p").race is None  # 24 dB, and 2.5 less on all data
    assert data.read == []
    trial = bench.trial(2, placement("good"), "p")
    assert (trial.sqnr_db, trial.all_data_db, trial.incumbent) == (27.0, 24.0, False)
    assert trial.race is not None  # 27 dB, and 1.5 less when rehearsed
    assert data.read == ["good"]
