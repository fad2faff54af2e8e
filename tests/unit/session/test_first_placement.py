"""A first placement that meets the limits is built before corrections, and again if they change its model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from simulated_times import simulate_times

from qdqspec.accuracy.constraint import AccuracyConstraint
from qdqspec.corrections.find import FoundCorrections
from qdqspec.measurement.bench import Bench, Built
from qdqspec.preparation.correcting import SECONDS, Correcting
from qdqspec.quantize.corrections import Corrections
from qdqspec.quantize.ranges import TensorRange
from qdqspec.session import Session
from qdqspec.session.tuning import FIRST_SHARE, OVERTIME_SHARE, _replayed, promising
from qdqspec.types import (
    CORRECTIONS,
    FIRST,
    AccuracyRules,
    Case,
    Consumer,
    CorrectionGain,
    Inputs,
    Placement,
    Progress,
    QuantizeRules,
    Samples,
    SearchLimits,
    Site,
    Trial,
    TuneRules,
)


@pytest.fixture(autouse=True)
def _fast_integers(engine_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer kernels are faster than float ones, and the time suffices, on any machine."""
    simulate_times(monkeypatch)
    monkeypatch.setattr("qdqspec.session.tuning.SECONDS", dict.fromkeys(SECONDS, 3600.0))


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    images = arrays_of(models.parent / "data" / "digits_calibration.npz")["input"][:16]
    np.savez(tmp_path / "calibration.npz", input=images)
    return Case(
        id="default",
        model=models / "digits_resnet.onnx",
        inputs=Inputs(calibration=tmp_path / "calibration.npz"),
        quantize=QuantizeRules(corrections=CORRECTIONS),  # sought at each limit
        tune=TuneRules(trials=3),
    )


def lines(session: Session, case: Case) -> list[dict[str, Any]]:
    text = (session.output(case) / "trials.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("least_db", "is_sought"), [(10.0, False), (44.0, True)], ids=["far", "near"])
def test_corrections_are_sought_only_if_the_limit_is_near_everything_quantized(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_db: float, is_sought: bool
) -> None:
    """A search that is resumed seeks them no more than the one that was interrupted."""
    sought = list[Correcting]()

    def noted(self: Correcting) -> FoundCorrections:
        sought.append(self)
        return FoundCorrections()

    monkeypatch.setattr(Correcting, "find", noted)
    case = replace(case, quantize=QuantizeRules(), tune=TuneRules(trials=3, min_sqnr_db=least_db))

    def stop(progress: Progress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    with Session(root=tmp_path) as session:
        session.watch = stop
        with pytest.raises(KeyboardInterrupt):
            session.search(case)
    with Session(root=tmp_path) as session:
        session.search(case)
    assert bool(sought) is is_sought


@pytest.mark.parametrize("integer", [0.5, 8.0], ids=["faster", "slower"])
def test_corrections_are_evaluated_on_the_first_placement(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, integer: float
) -> None:
    """On the one that won, or without one on the last that was built."""
    simulate_times(monkeypatch, integer)
    judged = []
    find = Correcting.find

    def noted(self: Correcting) -> FoundCorrections:
        judged.append(self._source.first)
        return find(self)

    monkeypatch.setattr(Correcting, "find", noted)
    with Session(root=tmp_path) as session:
        search = session.search(case)
        reference, *found = [line for line in lines(session, case) if line["phase"] != "noise"]
    firsts = [line for line in found if line["phase"] == FIRST]
    won = [line for line in firsts if line["incumbent"]]
    assert reference["phase"] == "pure"
    assert found[: len(firsts)] == firsts
    assert bool(won) is (integer < 1)
    assert [placement.digest for placement in judged] == [(won or firsts)[-1]["placement"]]
    if won:
        assert found[len(firsts)]["placement"] == won[-1]["placement"]
    assert FIRST not in {
        trial.phase for trial in search.trials
    }  # no candidate, because it has no corrections
    assert search.trials[0].placement.digest == reference["placement"]


def test_the_reported_time_left_is_that_of_the_whole_search(case: Case, tmp_path: Path) -> None:
    """The first placement and the corrections are part of that time, not shares of it with a separate limit.

    During the confirmation, which has no time limit, no time left is reported.
    """
    seen = []
    minutes = 2.0
    with Session(root=tmp_path) as session:
        session.watch = lambda progress: None if progress.waiting else seen.append(progress)
        session.search(replace(case, tune=replace(case.tune, minutes=minutes)))
    steps = [progress.doing for progress in seen]
    begun = steps.index("building the reference for a first placement")
    confirming = steps.index("confirming")
    left = [progress.seconds_left for progress in seen[begun:confirming]]
    known = [seconds for seconds in left if seconds is not None]
    assert len(known) == len(left)
    corrections = next(
        number for number, step in enumerate(steps) if step.startswith("looking for corrections")
    )
    assert known[: corrections - begun] == sorted(known[: corrections - begun], reverse=True)
    assert known[0] > FIRST_SHARE * 60 * minutes
    assert {progress.seconds_left for progress in seen[confirming:]} == {None}
    builds = [step for step in steps[confirming:] if step.startswith("confirming: build")]
    assert builds[:2] == [f"confirming: build {number} of {len(builds)}" for number in (1, 2)]
    assert f"confirming: timing {len(builds)} builds in turns, round 6 of 24" in steps[confirming:]


def test_a_resumed_search_does_not_build_the_first_placement_again(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_: Correcting) -> FoundCorrections:
        raise KeyboardInterrupt

    with Session(root=tmp_path) as session:
        with monkeypatch.context() as patched:
            patched.setattr(Correcting, "find", stopped)
            with pytest.raises(KeyboardInterrupt):
                session.search(case)
        torn = lines(session, case)
        assert FIRST in {line["phase"] for line in torn}
    with Session(root=tmp_path) as session:
        session.search(case)
        whole = lines(session, case)
    assert whole[: len(torn)] == torn
    assert FIRST not in {line["phase"] for line in whole[len(torn) :]}


def corrected(
    change: Callable[[Correcting, Placement], Corrections],
) -> Callable[[Correcting], FoundCorrections]:
    """Replaces the search for corrections: those of a function of the case and its first placement."""

    def find(self: Correcting) -> FoundCorrections:
        assert self._source.first is not None
        gain = CorrectionGain(name="ranges", before_db=30.0, after_db=31.0, changed=1, taken=True)
        return FoundCorrections(corrections=change(self, self._source.first), gains=(gain,))

    return find


def wider(correcting: Correcting, placement: Placement, *, own: bool) -> Corrections:
    """A wider range of an activation that the placement quantizes, or of one that it does not quantize."""
    numbers = correcting._prepared.calibrated[1]
    quantized = {site.tensor for site in placement.sites}
    spans = [(tensor, span) for tensor, span in numbers.ranges.items() if (tensor in quantized) is own]
    ranges = {tensor: TensorRange(span.low, 1.5 * span.high) for tensor, span in spans[:1]}
    return replace(numbers.corrections, ranges=ranges)  # with the scales that are kept


@pytest.fixture
def mostly(case: Case, tmp_path: Path) -> Case:
    """The case under an SQNR limit, with everything but the last layers quantized as the first placement."""
    with Session(root=tmp_path, no_cache=True) as session, session.study(case) as study:
        most = list(study.space.everything().items())[:-3]
        study.export(tmp_path / "most.onnx", study.space.resolve(dict(most)))
    return replace(case, tune=TuneRules(trials=2, min_sqnr_db=20.0, start_from=(tmp_path / "most.onnx",)))


def measured(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the journal without its place in the search."""
    return {key: value for key, value in line.items() if key not in ("trial", "phase", "eps", "sum")}


@pytest.mark.parametrize(
    ("find", "is_used"),
    [
        (lambda _: FoundCorrections(), True),
        (corrected(partial(wider, own=False)), True),
        (corrected(partial(wider, own=True)), False),
    ],
    ids=["none", "of other sites", "of its sites"],
)
def test_the_first_placement_is_built_again_only_if_corrections_change_its_model(
    mostly: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    find: Callable[[Correcting], FoundCorrections],
    *,
    is_used: bool,
) -> None:
    monkeypatch.setattr(Correcting, "find", find)
    with Session(root=tmp_path) as session:
        search = session.search(mostly)
        found = [line for line in lines(session, mostly) if line["phase"] not in ("noise", "confirm")]
    firsts = {line["placement"]: line for line in found if line["phase"] == FIRST}
    again = next(line for line in found if line["phase"] == "pure" and line["scheme"]["sites"])
    first = firsts[again["placement"]]
    assert (measured(again) == measured(first)) is is_used
    assert search.trials[1].ratio == again["ratio"]
    assert search.built == 2  # with the reference


def narrow(correcting: Correcting, placement: Placement) -> Corrections:
    """Ranges of all quantized activations with which the outputs are meaningless."""
    numbers = correcting._prepared.calibrated[1]
    quantized = {site.tensor for site in placement.sites}
    spans = [(tensor, span) for tensor, span in numbers.ranges.items() if tensor in quantized]
    ranges = {tensor: TensorRange(span.low / 100, span.high / 100) for tensor, span in spans}
    return replace(numbers.corrections, ranges=ranges)


@pytest.mark.parametrize("is_metric", [True, False])
def test_corrections_with_which_the_first_placement_misses_the_metric_are_dropped(
    mostly: Case, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_metric: bool
) -> None:
    """Under an SQNR limit alone other placements near the first one may still meet it."""
    monkeypatch.setattr(Correcting, "find", corrected(narrow))
    inputs = replace(mostly.inputs, evaluation=models.parent / "data" / "digits_evaluation.npz")
    tune = replace(mostly.tune, min_sqnr_db=None, accuracy=AccuracyRules(metric="top1", max_drop=0.02))
    case = replace(mostly, inputs=inputs, tune=tune) if is_metric else mostly
    with Session(root=tmp_path) as session:
        search = session.search(case)
        found = [line for line in lines(session, case) if line["phase"] not in ("noise", "confirm")]
        kept = json.loads((session.output(case) / "corrections.json").read_text(encoding="utf-8"))
        is_noted = any("no corrections are applied" in note for note in session.work(case).warnings)
    firsts = {line["placement"]: line for line in found if line["phase"] == FIRST}
    assert any(line["incumbent"] for line in firsts.values())
    again = next(line for line in found if line["phase"] == "pure" and line["placement"] in firsts)
    assert (measured(again) == measured(firsts[again["placement"]])) is is_metric
    assert [gain.taken for gain in search.corrections] == [not is_metric]
    assert [gain["taken"] for gain in kept["gains"]] == [not is_metric]
    assert bool(kept["ranges"]) is not is_metric
    assert is_noted is is_metric


def state_of(bench: Bench) -> tuple[object, ...]:
    """The state of a bench before a build: the noise of builds, the incumbent, graphs built before, and accuracies."""
    best, admission = bench._incumbent, bench._admission
    assert admission is not None
    accuracies = admission.few_db, admission.confirmed_db, admission.scores
    return deepcopy(
        (
            bench.eps,
            best and (best.placement.digest, best.ratio),
            bench._seen.keys() - {""},
            *accuracies,
            admission.bar,
            admission.difference,
        )
    )


@pytest.mark.parametrize(
    "rules",
    [
        {"min_sqnr_db": 20.0},
        {"min_sqnr_db": 40.0},
        {"accuracy": AccuracyRules(metric="top1", max_drop=0.02)},
    ],
    ids=["SQNR", "binding SQNR", "metric"],
)
def test_a_search_resumed_after_any_trial_has_the_same_state_and_next_build(
    case: Case, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """From the first placement on, whose rehearsals have a time limit. Corrections do not change its model."""
    evaluation = models.parent / "data" / "digits_evaluation.npz"
    inputs = replace(case.inputs, evaluation=evaluation)
    case = replace(case, inputs=inputs, tune=TuneRules(trials=4, **rules))
    monkeypatch.setattr(Correcting, "find", corrected(lambda *_: Corrections()))
    build, built = Bench.build, list[tuple[int, tuple[object, ...]]]()

    def noted(self: Bench, number: int, placement: Placement, phase: str, **how: Any) -> Built:
        written = journal.read_bytes().count(b"\n") if journal.exists() else 0
        built.append((written, (phase, placement.digest, *state_of(self))))
        return build(self, number, placement, phase, **how)

    def steady(self: Bench, *_: object) -> Samples:
        self.eps = 0.02
        return Samples()

    def stopped(self: Bench, number: int, placement: Placement, phase: str, **_: object) -> None:
        stops.append((phase, placement.digest, *state_of(self)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure_noise", steady)
    with Session(root=tmp_path, no_cache=True) as session, monkeypatch.context() as patched:
        journal = session.output(case) / "trials.jsonl"
        patched.setattr(Bench, "build", noted)
        session.search(case)
    text = journal.read_bytes().splitlines(keepends=True)
    phases = [line["phase"] for line in lines(session, case)]
    firsts = [number for number, phase in enumerate(phases, 1) if phase == FIRST]
    assert firsts
    monkeypatch.setattr(Bench, "build", stopped)
    for cut in range(firsts[-1], built[-1][0] + 1):
        journal.write_bytes(b"".join(text[:cut]))
        expected, stops = next(known for written, known in built if written >= cut), list[Any]()
        with Session(root=tmp_path, no_cache=True) as session, pytest.raises(KeyboardInterrupt):
            session.search(case)
        assert stops == [expected]


def test_there_is_no_first_placement_without_calibration_data(case: Case, tmp_path: Path) -> None:
    plain = Case(id="default", model=case.model, tune=case.tune)
    with Session(root=tmp_path) as session:
        session.search(plain)
        assert FIRST not in {line["phase"] for line in lines(session, plain)}


def test_near_misses_of_the_limit_are_repaired_after_the_search(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def repaired(trials, near_miss, oracle, space) -> Iterator[Placement]:  # type: ignore[no-untyped-def] # as in `search.repair`
        asked.append(near_miss.least_db)
        yield space.resolve(space.everything())

    monkeypatch.setattr("qdqspec.session.tuning.repaired", repaired)
    left: dict[str, float | None] = {}
    with Session(root=tmp_path) as session:
        session.watch = lambda progress: left.update({progress.doing: progress.seconds_left})
        search = session.search(replace(case, tune=TuneRules(trials=1, min_sqnr_db=15.0, minutes=8)))
    assert asked == [15.0]
    assert [trial.phase for trial in search.trials] == ["pure", "repair"]
    assert 0 < (left["building candidate 1"] or 0) <= 60 * 8 * OVERTIME_SHARE  # the time limit of repairs


def _first(number: int, ratio: float, sqnr_db: float, all_data_db: float | None = None, **more: Any) -> Trial:
    tensor = Site(tensor=f"t{number}", consumers=(Consumer(node="n", input=0),), format="uint8")
    placement = Placement(sites=frozenset({tensor}))
    found = {"ratio": ratio, "sqnr_db": sqnr_db, "all_data_db": all_data_db, **more}
    return Trial(number=number, phase=FIRST, placement=placement, **found)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([], None),
        ([_first(1, 1.2, 50.0), _first(2, 1.1, 12.0)], 2),  # no near miss: the last
        ([_first(1, 0.95, 45.0, incumbent=True), _first(2, 1.1, 50.0)], 1),  # the winner
        (
            [_first(1, 0.5, 35.0, 28.3), _first(2, 0.95, 45.0, incumbent=True)],
            1,
        ),  # much faster, 1.7 dB missing
        ([_first(1, 0.94, 35.0, 28.3), _first(2, 0.95, 45.0, incumbent=True)], 2),  # no relevant gain
        ([_first(1, 0.5, 24.0), _first(2, 0.95, 45.0, incumbent=True)], 2),  # far below the limit
        ([_first(1, 0.5, 28.0), _first(2, 0.4, 28.0, status="failed")], 1),
    ],
)
def test_corrections_are_evaluated_on_the_winner_or_a_near_miss(
    trials: list[Trial], expected: int | None
) -> None:
    placement = promising(trials, AccuracyConstraint(SearchLimits(min_sqnr_db=30.0, min_gain=0.02)))
    assert placement == next((trial.placement for trial in trials if trial.number == expected), None)


@pytest.mark.parametrize(("samples", "is_kept"), [(0, False), (18, False), (30, True)])
def test_the_variation_from_few_builds_of_a_first_placement_is_measured_again(
    samples: int, *, is_kept: bool
) -> None:
    reference = Trial(number=0, phase="pure", placement=Placement(sites=frozenset()))
    noise = replace(reference, phase="noise", samples=Samples(wall_ms=(1.0,) * samples), eps=0.05)
    first, own = (replace(reference, number=1, phase=phase) for phase in (FIRST, "pure"))
    again = replace(noise, samples=Samples(wall_ms=(1.0,) * 12))
    assert _replayed([reference, first, noise]) == [reference, *([noise] if is_kept else [])]
    assert _replayed([reference, first, noise, own, again]) == [reference, noise, own, again]
