"""The contest on the simulated device: the incumbent, failures, false alarms, parts of the model, and open engines."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qdqspec.accuracy.evaluator import Runs
from qdqspec.backends.open_engines import Engines
from qdqspec.errors import BackendError, OutputError
from qdqspec.search.limits import Limits
from qdqspec.timing.race import Load
from qdqspec.types import Placement, Trial
from tests.support.lab import (
    FEEDS,
    QUIET,
    REFERENCE,
    Arena,
    Candidate,
    Lab,
    MakeLab,
    known,
    placement,
    raising,
    started,
)


def test_a_faster_candidate_becomes_the_incumbent_and_ratios_are_multiplied(make_lab: MakeLab) -> None:
    lab = make_lab(QUIET, fast=Candidate(scale=0.8), faster=Candidate(scale=0.4))
    arena = started(lab)
    first, second = (arena.trial(n, placement(name), "p") for n, name in ((1, "fast"), (2, "faster")))
    assert (first.incumbent, second.incumbent) == (True, True)
    assert first.ratio == pytest.approx(0.8)
    assert second.race.opponent == placement("fast").digest
    assert second.race.ratio == pytest.approx(0.5)
    assert second.ratio == arena.best == pytest.approx(0.4)


def test_a_candidate_with_a_known_graph_is_not_raced(make_lab: MakeLab) -> None:
    lab = make_lab(one=Candidate(scale=1.3, graph="g"), two=Candidate(scale=1.3, graph="g"))
    arena = started(lab)
    one, two = (arena.trial(i, placement(name), "p", profile=True) for i, name in ((1, "one"), (2, "two")))
    assert (two.race.verdict, two.race.pairs) == ("same graph", 0)
    assert two.race.opponent == placement("one").digest
    assert one.layers
    assert (two.ratio, two.samples, two.layers) == (one.ratio, one.samples, one.layers)
    assert len(lab.open) == 1


def test_a_candidate_whose_layers_cannot_be_timed_is_raced_without_them(make_lab: MakeLab) -> None:
    """As if the runtime builds a large model again for its profile, which takes too long."""
    lab = make_lab(odd=Candidate(scale=0.5, fails=lambda where, _: where == "layers"))
    arena = started(lab)
    trial = arena.trial(1, placement("odd"), "p", profile=True)
    assert (trial.status, trial.incumbent, trial.layers) == ("ok", True, ())
    assert "layers were not timed: odd fails in layers" in trial.samples.notes
    assert [engine.name for engine in lab.open] == ["odd"]


@pytest.mark.parametrize("stage", ["write", "build", "bind", "time"])
def test_a_candidate_that_fails_is_a_failed_trial(make_lab: MakeLab, stage: str) -> None:
    lab = make_lab(bad=Candidate(fails=lambda where, _: where == stage))
    arena = started(lab)
    trial = arena.trial(1, placement("bad"), "p", profile=True)
    assert (trial.status, trial.incumbent, trial.ratio, arena.best) == ("failed", False, None, 1.0)
    assert f"bad fails in {stage}" in (trial.error or "")
    assert "bad" not in {engine.name for engine in lab.open}


def test_the_folder_of_the_candidates_is_not_in_the_message_of_a_failure(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    """It is a temporary folder, which does not exist any more when the journal is read."""

    def refuse(*_: object) -> bool:
        raise BackendError(f"{tmp_path / 'odd.onnx'}: node 'n' is odd", where=tmp_path / "odd.onnx")

    arena = started(make_lab(odd=Candidate(fails=refuse)), folder=tmp_path)
    trial = arena.trial(1, placement("odd"), "pure")
    assert trial.error == "odd.onnx: odd.onnx: node 'n' is odd"
    measured = arena.bench.compare({"reference": REFERENCE, "tuned": placement("odd")})
    assert str(tmp_path) not in measured.failures["tuned"]


def test_an_incumbent_that_fails_in_a_race_is_built_again_for_the_same_challenger(make_lab: MakeLab) -> None:
    lab = make_lab(good=Candidate(scale=0.7))
    arena = started(lab)
    lab.candidates["reference"].fails = lambda stage, count: stage == "time" and count == 4
    trial = arena.trial(1, placement("good"), "p")
    assert trial.ok
    assert trial.incumbent
    assert lab.built.count("reference") >= 2


def test_an_incumbent_of_an_earlier_run_is_built_when_first_needed(make_lab: MakeLab) -> None:
    """A block that was quantized alone to measure its SQNR may be a candidate later: it has no time, and is raced."""
    lab = make_lab(fast=Candidate(scale=0.5), faster=Candidate(scale=0.3, graph="g"))
    arena = Arena(lab)
    arena.recall(known(REFERENCE, 1.0))
    arena.recall(known(placement("fast"), 0.5))
    arena.recall(replace(known(placement("faster"), 1.0, graph_hash="g"), ratio=None, incumbent=False))
    assert not lab.built
    trial = arena.trial(2, placement("faster"), "p")
    assert trial.incumbent
    assert trial.race.opponent == placement("fast").digest
    assert trial.ratio == pytest.approx(0.3, rel=0.1)


def test_other_exceptions_than_those_of_the_backend_propagate_and_no_engine_stays_open(
    make_lab: MakeLab,
) -> None:
    lab = make_lab(good=Candidate(scale=0.7))
    arena = started(lab)

    for error, stage, nth in ((OutputError("no space left"), "write", 1), (KeyboardInterrupt(), "time", 2)):
        lab.candidates["good"].fails = raising(error, stage, nth)
        with pytest.raises(type(error)):
            arena.trial(1, placement("good"), "p")
    arena.bench.close()
    assert not lab.open


def test_only_timing_locks_the_device(make_lab: MakeLab) -> None:
    events: list[str] = []

    @contextmanager
    def exclusive():
        events.append("in")
        yield
        events.append("out")

    lab = make_lab()
    lab.candidates["reference"].fails = lambda stage, _: stage == "build" and bool(events.append(stage))
    started(lab, exclusive=exclusive)
    assert events == ["build", "in", "out"]


# ---- false alarms and power of whole trials -----------------------------------------------------


DRIFT = {"fake.drift": "0.3", "fake.drift_period": "0.05"}


@pytest.mark.parametrize(
    ("scale", "words", "seeds", "least", "most"),
    [  # of equal speed 4 % win over 1,500 seeds; 16 % without the second race
        (1.0, {}, 300, 0.0, 0.06),
        (1.0, DRIFT, 60, 0.0, 0.06),
        (0.9, {}, 60, 0.95, 1.0),
    ],
)
def test_a_candidate_of_equal_speed_rarely_wins_and_one_ten_per_cent_faster_nearly_always(
    make_lab: MakeLab, scale: float, words: dict[str, str], seeds: int, least: float, most: float
) -> None:
    """One challenge per simulated device with the noise and eps of a shared machine."""
    won = []
    for seed in range(seeds):
        lab = make_lab({"fake.seed": str(seed), **words}, other=Candidate(scale=scale))
        arena = started(lab, seed)
        arena.measure_variation(known(REFERENCE, 1.0))
        won.append(arena.trial(1, placement("other"), "p").incumbent)
        assert len(lab.open) == 1
    assert least <= np.mean(won) <= most


# ---- parts of the model ---------------------------------------------------------------------------

PART = ("n1", "n2")


def with_parts(lab: Lab) -> Arena:
    """An arena that writes a float part as the candidate ``part``, and a part with pairs as that of the placement."""

    def extract(what: Placement, nodes: tuple[str, ...]) -> tuple[Path, Load]:
        return lab.write(what) if what.sites else Path("part"), Load(feeds=FEEDS)

    return started(lab, extract=extract)


def part_of(arena: Arena, what: Placement) -> Trial:
    return arena.trial(1, what, "isolated", profile=True, subgraph=PART)


def test_a_part_is_raced_against_the_same_part_in_float_and_never_becomes_the_incumbent(
    make_lab: MakeLab,
) -> None:
    lab = make_lab(QUIET, part=Candidate(scale=0.2), half=Candidate(scale=0.1))
    lab.candidates["weak"] = Candidate(fails=lambda stage, count: stage == "time" and count > 2)
    arena = with_parts(lab)
    floats, trial = part_of(arena, REFERENCE), part_of(arena, placement("half"))
    assert (floats.ratio, floats.race, floats.subgraph) == (1.0, None, PART)
    assert trial.ratio == pytest.approx(0.5)
    assert trial.race.verdict == "faster"
    assert trial.layers
    assert (trial.incumbent, arena.best) == (False, 1.0)
    assert [engine.name for engine in lab.open] == ["reference", "part"]
    assert not part_of(arena, placement("weak")).ok
    assert [engine.name for engine in lab.open] == ["reference"], "no part that failed in its race stays open"
    assert part_of(arena, placement("half")).ok
    assert arena.trial(2, placement("half"), "pure").incumbent
    arena.bench.close()
    assert lab.open == []


@pytest.mark.parametrize(("second", "won"), [(0.97, True), (0.99, False)])
def test_the_second_race_is_for_what_makes_the_mean_gain_significant(
    make_lab: MakeLab, second: float, *, won: bool
) -> None:
    """The first race has a ratio of 0.92, and differences count from 5 %: together 0.97 is enough, 0.99 is not."""

    def rebuilt(stage: str, count: int) -> bool:
        candidate.scale = second if (stage, count) == ("build", 2) else candidate.scale
        return False

    candidate = Candidate(0.92, fails=rebuilt)
    arena = started(make_lab(QUIET, a=candidate))
    arena.eps = 0.05
    assert arena.trial(1, placement("a"), "p").incumbent == won


def test_all_data_is_run_on_several_engines_of_a_candidate(make_lab: MakeLab) -> None:
    """They are closed before others are timed."""
    several = list[bool]()

    def sqnr_db(engine: Runs) -> float:
        several.append(isinstance(engine, Engines))
        return 30.0

    lab = make_lab(QUIET, a=Candidate(0.7))
    arena = started(lab, limits=Limits(first_samples=sqnr_db), engines=2)
    assert arena.trial(1, placement("a"), "p").incumbent
    assert several == [True, True]
    assert [engine.name for engine in lab.open] == ["a"]
    alone = started(make_lab(QUIET), limits=Limits(first_samples=sqnr_db), engines=2, memory=lambda *_: False)
    assert several.pop() is False
    alone.bench.close()
