"""The search loop of any strategy, and the contest on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from searches import Additive, limited

from qdqspec._core.progress import Deadline
from qdqspec._core.registry import names, resolve
from qdqspec.accuracy.evaluator import Runs
from qdqspec.backends.open_engines import Engines
from qdqspec.errors import BackendError, OutputError
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.search.limits import Limits
from qdqspec.search.loop import Built, Search
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.timing.race import Load
from qdqspec.types import Placement, Progress, Race, Samples, Trial
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

NAMES = ("reference", "a", "b", "c", "d", "e")
PLACED = {"reference": REFERENCE, **{name: placement(name) for name in NAMES[1:]}}
NAME_OF = {placed.digest: name for name, placed in PLACED.items()}


@dataclass
class Script:
    """A strategy that proposes named placements in order."""

    names: Sequence[str] = NAMES
    asked: int = 0

    def ask(self, n: int = 1) -> list[Proposal]:
        batch = self.names[self.asked : self.asked + n]
        self.asked += len(batch)
        return [Proposal(placement=PLACED[name], phase="pure", profile=name == "a") for name in batch]

    def tell(self, trials: Sequence[Trial]) -> None:
        pass

    def done(self) -> bool:
        return self.asked >= len(self.names)


class Contest:
    """A contest without measurements: candidates in ``fails`` fail, ``a`` and ``c`` win."""

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = fails
        self.built: list[str] = []
        self.best: float | None = None
        self.eps = 0.01
        self.seconds = 0.0  # of each build

    def build(self, number: int, proposal: Proposal) -> Built:
        self.built.append(name := NAME_OF[proposal.placement.digest])
        how = {"placement": proposal.placement, "build_seconds": self.seconds}
        trial = Trial(number=number, phase=proposal.phase, **how)
        if name in self.fails:
            return Built(replace(trial, status="failed", error=f"{name} is broken"))
        won = name in ("reference", "a", "c")
        self.best = 1.0 - number / 10 if won else self.best
        verdict = "faster" if won else "slower"
        race = Race(opponent="x", ratio=0.9, p_value=0.0, pairs=6, verdict=verdict) if number else None
        return Built(replace(trial, incumbent=won, ratio=self.best, race=race))

    def measure(self, built: Built) -> Trial:
        return built.trial

    def recall(self, trial: Trial) -> None:
        self.best = trial.ratio if trial.incumbent else self.best

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        return Samples(wall_ms=(1.0, 1.1, 1.2))


def search_of(
    script: Script, contest: Contest, *, trials: int = 60, log=None, deadline=None, **more
) -> Search:
    limits = {"case": "case", "most_trials": trials, **more}
    log = [] if log is None else log
    return Search(script, contest, deadline or Deadline(), log, **limits)  # type: ignore[arg-type] # stand-ins


def run(contest: Contest, *, seconds=None, names=NAMES, **more) -> tuple[Trial, ...]:
    clock = iter(range(10_000))
    deadline = Deadline(seconds=seconds, clock=lambda: float(next(clock)))
    return search_of(Script(names), contest, deadline=deadline, **more).run()


def names_of(trials: Sequence[Trial]) -> list[str]:
    return [NAME_OF[trial.placement.digest] for trial in trials]


def test_progress_counts_the_results_of_trials() -> None:
    seen: list[Progress] = []
    run(Contest(fails=("b",)), trials=10, seconds=1000.0, watch=seen.append)
    assert [progress.done for progress in seen if not progress.doing] == [1, 2, 3, 4, 5, 6]
    steps = [progress.doing for progress in seen if progress.doing]
    assert steps[1:3] == ["building the reference", "timing the reference"]
    last = seen[-1]
    assert (last.kept, last.dropped, last.failed, last.total, last.case) == (2, 2, 1, 10, "case")
    assert last.best == pytest.approx(0.7)
    assert last.seconds_left is not None
    assert 0 <= last.seconds_left <= 1000


@pytest.mark.parametrize(
    ("trials", "seconds", "limit"),
    [
        (4, None, "its limit of 4 builds"),
        (60, 3.0, "its limit of 3.0 s"),
        (60, 90.0, "its limit of 1 min 30 s"),
        (6, None, ""),  # exactly the number of proposals
        (0, None, "its limit of 0 builds"),
        (60, 0.0, "its limit of 0.0 s"),
    ],
)
def test_the_search_reports_the_limit_that_ended_it(trials: int, seconds: float | None, limit: str) -> None:
    """The reference is built for any budget."""
    clock = iter(range(10_000))
    deadline = Deadline(seconds=seconds, clock=lambda: (seconds or 1.0) / 3 * next(clock))
    search = search_of(Script(NAMES), Contest(), deadline=deadline, trials=trials)
    assert names_of(search.run())[0] == "reference"
    assert search.ended_by == limit
    assert len(search.trials) == 1 or (trials and seconds != 0)


# ---- resume -------------------------------------------------------------------------------------


def journal(*names: str) -> list[Trial]:
    """The journal of a run that was killed after these placements."""
    log = list[Trial]()
    run(Contest(), names=names, log=log)
    return log


def test_a_resumed_search_builds_what_is_not_in_the_journal_whatever_its_order() -> None:
    contest = Contest()
    trials = run(contest, replay=journal("reference", "a", "c", "b"))
    assert contest.built == ["d", "e"]
    assert names_of(trials) == ["reference", "a", "c", "b", "d", "e"]


@pytest.mark.parametrize(("phase", "subgraph"), [("isolated", ("n",)), ("confirm", ())])
def test_results_of_subgraphs_and_of_confirmations_are_not_replayed_as_candidates(
    phase: str, subgraph: tuple[str, ...]
) -> None:
    """A placement may be proposed for a subgraph and for the whole model."""
    contest = Contest()
    other = Trial(number=2, phase=phase, placement=placement("b"), ratio=0.5, subgraph=subgraph)
    trials = run(contest, replay=[*journal("reference", "a"), other])
    assert contest.built == ["b", "c", "d", "e"]
    (whole,) = [t for t in trials if t.placement == placement("b") and not t.subgraph]
    assert whole.ratio != 0.5


def test_time_for_confirmation_builds_is_reserved_once_a_candidate_has_won() -> None:
    deadline, left = Deadline(seconds=40.0, clock=lambda: 0.0), list[float | None]()
    contest = Contest()
    contest.seconds = 2.0
    search = search_of(Script(NAMES), contest, deadline=deadline, confirming=5)
    for _ in search:
        left.append(deadline.left)
    assert left[:2] == [40.0, 30.0]


# ---- resumed searches of all strategies ---------------------------------------------------------------


MOST = {"optuna": 12}  # trials of strategies that take tens of milliseconds for each proposal


class Device(Contest):
    """A contest without measurements: an oracle computes results, and a third of the builds fails.

    The task metric of a placement grows with its SQNR, unevenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.space = small_space()
        self.limits, self.truth = limited(least_score=0.8), Additive(self.space)
        self._oracle = Oracle(
            self.space, 3, fails=lambda placement: int(placement.digest, 16) % 3 == 0, eps=0.02
        )

    def build(self, number: int, proposal: Proposal) -> Built:
        self.built.append(f"{proposal.placement.digest} {proposal.subgraph}")
        best = self._oracle._best
        answer = self._oracle.answer(proposal)
        trial = replace(answer, number=number, subgraph=proposal.subgraph, eps=None)
        if trial.ok and not trial.subgraph and trial.placement.sites:
            sqnr_db = self.truth.truth(trial.placement)
            score = min(1.0, (sqnr_db + int(trial.placement.digest[:4], 16) / 0x7FFF) / 50)
            trial = replace(trial, sqnr_db=sqnr_db, accuracy=score)
        self.limits.learn(trial)
        if proposal.subgraph or not self.limits.admits(trial.placement):
            self._oracle._best = best
            trial = replace(trial, incumbent=False)
        self.best = trial.ratio if trial.incumbent else self.best
        return Built(trial)

    def recall(self, trial: Trial) -> None:
        self._oracle.asked.append(Proposal(placement=trial.placement, phase=trial.phase))
        self.limits.learn(trial)
        if trial.incumbent:
            self.best, self._oracle._best = trial.ratio, self._oracle.cost(trial.placement)

    def measure_variation(self, reference: Trial, seconds: float | None = None) -> Samples:
        self.eps = 0.02
        return super().measure_variation(reference)


class Log(list[Trial]):
    """A journal whose trials are serialized and parsed as in the real one."""

    def append(self, trial: Trial) -> None:
        super().append(trial_from_json(json.loads(json.dumps(trial_to_json(trial)))))


def searched(strategy: str, replay: Sequence[Trial] = ()) -> tuple[Search, Device, Log]:
    device, log = Device(), Log()
    trials = MOST.get(strategy, 24)
    setup = SearchSetup(space=device.space, trials=trials, limits=device.limits, accuracy=device.truth)
    made = resolve("strategy", strategy)(setup, np.random.default_rng(5))
    search = Search(made, device, Deadline(), log, case="case", most_trials=trials, replay=replay)  # type: ignore[arg-type] # implements the part of a contest that a search uses
    search.run()
    return search, device, log


@pytest.mark.parametrize("strategy", names("strategy"))
def test_a_resumed_search_has_the_trials_of_an_uninterrupted_one(strategy: str) -> None:
    whole, device, log = searched(strategy)
    assert len(device.built) > 3
    for cut in range(1, len(log) + 1):
        again, resumed, added = searched(strategy, log[:cut])
        assert again.trials == whole.trials
        assert [*log[:cut], *added] == log
        assert resumed.built == device.built[len(device.built) - len(resumed.built) :]
        assert len(resumed.built) + sum(t.phase != "noise" for t in log[:cut]) == len(device.built)


# ---- the contest on the simulated device: the incumbent, failures, parts of the model, open engines -------


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
    assert [engine.name for engine in lab.open] == ["part"]
    assert not part_of(arena, placement("weak")).ok
    assert lab.open == [], "no part that failed in its race stays open"
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
