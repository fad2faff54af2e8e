"""Trials on the simulated device: the incumbent, failures, noise, confirmation, and engines that remain open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqspec.arrays import Array
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError, OutputError, PlacementError, QdqspecError
from qdqspec.measurement import bench as bench_module
from qdqspec.measurement.admission import Admission
from qdqspec.measurement.bench import (
    ASSUMED_EPS,
    FEW_BUILDS,
    FLOOR_EPS,
    MOST_EPS,
    NOISE_BUILDS,
    NOISE_ROUNDS,
    Bench,
    significant,
)
from qdqspec.measurement.engines import Engines
from qdqspec.measurement.profiles import Load, Part
from qdqspec.parity.gate import Runs
from qdqspec.testing.backends import small_model
from qdqspec.types import Consumer, LayerTime, Placement, RatioTest, Samples, Site, Trial

FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}
QUIET = {"fake.run_noise": "0", "fake.wall_noise": "0", "fake.build_noise": "0"}
REFERENCE = Placement(sites=frozenset())


def placement(name: str) -> Placement:
    """A placement whose model file has that name; its site is never inserted."""
    return Placement(sites=frozenset({Site(tensor=name, consumers=(Consumer("n", 0),), format="uint8")}))


@dataclass
class Candidate:
    """Properties of a placement: its speed, the hash of its graph, and when it fails."""

    scale: float = 1.0
    graph: str = ""
    fails: Callable[[str, int], bool] = lambda stage, count: False  # stage, and how often it was reached


@dataclass
class Lab:
    """A simulated backend: builds placements by name, counts builds and open engines."""

    candidates: dict[str, Candidate]
    words: Mapping[str, str]
    device: FakeDevice = field(default_factory=FakeDevice)
    built: list[str] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)  # of each build
    hashed: list[bool] = field(default_factory=list)
    open: list[WatchedEngine] = field(default_factory=list)
    stages: Counter[tuple[str, str]] = field(default_factory=Counter)
    file: Path = Path()

    def write(self, what: Placement) -> Path:
        name = next((site.tensor for site in what.sites), "reference")
        self.reach(name, "write", PlacementError)
        return Path(name)

    def build(self, model: Path, options: BuildOptions) -> WatchedEngine:
        name = model.name
        self.reach(name, "build")
        words = {**self.words, "fake.scale": str(self.candidates[name].scale)}
        engine = self.device.build(self.file, BuildOptions(extra=words))
        self.built.append(name)
        self.fresh.append(options.fresh)
        self.hashed.append(options.hashed)
        watched = WatchedEngine(self, name, engine)
        self.open.append(watched)
        return watched

    def reach(self, name: str, stage: str, error: type[QdqspecError] = BackendError) -> None:
        self.stages[name, stage] += 1
        if self.candidates[name].fails(stage, self.stages[name, stage]):
            raise error(f"{name} fails in {stage}")


class WatchedEngine:
    def __init__(self, lab: Lab, name: str, engine: FakeEngine) -> None:
        self.lab, self.name, self.engine = lab, name, engine
        self.graph_hash = lab.candidates[name].graph
        self.closed = False

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self.engine.run(feeds)

    def bind(self, feeds: Mapping[str, Array]) -> None:
        self._reach("bind")
        self.engine.bind(feeds)

    def time(self, runs: int, warmup: int = 0) -> Samples:
        self._reach("time")
        return self.engine.time(runs, warmup)

    def layers(self, runs: int = 12) -> tuple[LayerTime, ...]:
        self._reach("layers")
        return self.engine.layers(runs)

    def close(self) -> None:
        self.closed = True
        if self in self.lab.open:
            self.lab.open.remove(self)

    def _reach(self, stage: str) -> None:
        if self.closed:
            raise BackendError("the engine is closed")
        try:
            self.lab.reach(self.name, stage)
        except BackendError:
            self.close()
            raise


MakeLab = Callable[..., Lab]


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    """``make_lab(fast=Candidate(scale=0.8))``: these candidates and a reference of scale 1."""
    file = tmp_path / "model.onnx"
    onnx.save(small_model(), file)

    def make(words: Mapping[str, str] | None = None, **candidates: Candidate) -> Lab:
        return Lab({"reference": Candidate(), **candidates}, words or {}, file=file)

    return make


def bench_of(lab: Lab, seed: int = 0, **more) -> Bench:
    return Bench(lab, lab.write, FEEDS, clock="cpu", random=np.random.default_rng(seed), **more)


def known(what: Placement, ratio: float, **more) -> Trial:
    """A trial of an earlier run, which won its race."""
    return Trial(number=0, phase="p", placement=what, ratio=ratio, incumbent=True, **more)


def started(lab: Lab, seed: int = 0, **more) -> Bench:
    bench = bench_of(lab, seed, **more)
    assert bench.trial(0, REFERENCE, "pure").incumbent
    return bench


def test_the_first_trial_becomes_the_incumbent(make_lab: MakeLab) -> None:
    bench = bench_of(make_lab())
    assert bench.best is None
    trial = bench.trial(0, REFERENCE, "pure", profile=True)
    assert (trial.ok, trial.incumbent, trial.ratio, trial.race) == (True, True, 1.0, None)
    assert trial.layers
    assert trial.samples.wall_ms
    assert bench.best == 1.0


def test_a_faster_candidate_becomes_the_incumbent_and_ratios_are_multiplied(make_lab: MakeLab) -> None:
    lab = make_lab(QUIET, fast=Candidate(scale=0.8), faster=Candidate(scale=0.4))
    bench = started(lab)
    first, second = (bench.trial(n, placement(name), "p") for n, name in ((1, "fast"), (2, "faster")))
    assert (first.incumbent, second.incumbent) == (True, True)
    assert first.ratio == pytest.approx(0.8)
    assert second.race is not None
    assert second.race.opponent == placement("fast").digest
    assert second.race.ratio == pytest.approx(0.5)
    assert second.ratio == bench.best == pytest.approx(0.4)


def test_samples_of_both_candidates_of_a_race_are_recorded_in_pairs(make_lab: MakeLab) -> None:
    """Those of both races if it won, so that the verdicts can be computed again from the journal."""
    lab = make_lab(fast=Candidate(scale=0.8), slow=Candidate(scale=0.88))
    bench = started(lab)
    for number, name in enumerate(("fast", "slow"), 1):
        trial = bench.trial(number, placement(name), "pure")
        assert trial.race is not None
        assert len(trial.samples.cpu_ms) == len(trial.rival.cpu_ms) == trial.race.pairs
        ratios = np.log(np.asarray(trial.samples.cpu_ms) / np.asarray(trial.rival.cpu_ms))
        assert np.exp(np.median(ratios)) == pytest.approx(trial.race.ratio, rel=0.02)
        assert trial.race.interval is not None
        assert trial.race.interval.low <= trial.race.ratio <= trial.race.interval.high


def test_a_slower_candidate_is_closed_and_the_incumbent_stays(make_lab: MakeLab) -> None:
    lab = make_lab(slow=Candidate(scale=1.1))
    bench = started(lab)
    trial = bench.trial(1, placement("slow"), "p")
    assert (trial.ok, trial.incumbent) == (True, False)
    assert bench.best == 1.0
    assert [engine.name for engine in lab.open] == ["reference"]


def test_layers_are_timed_only_if_requested(make_lab: MakeLab) -> None:
    lab = make_lab(a=Candidate(), b=Candidate())
    bench = started(lab)
    assert not bench.trial(1, placement("a"), "p").layers
    assert bench.trial(2, placement("b"), "p", profile=True).layers


def test_a_candidate_with_a_known_graph_is_not_raced(make_lab: MakeLab) -> None:
    lab = make_lab(one=Candidate(scale=1.3, graph="g"), two=Candidate(scale=1.3, graph="g"))
    bench = started(lab)
    one, two = bench.trial(1, placement("one"), "p"), bench.trial(2, placement("two"), "p")
    assert two.race is not None
    assert (two.race.verdict, two.race.pairs) == ("same graph", 0)
    assert two.race.opponent == placement("one").digest
    assert (two.ratio, two.samples) == (one.ratio, one.samples)
    assert len(lab.open) == 1


def test_graphs_without_a_hash_are_treated_as_different(make_lab: MakeLab) -> None:
    bench = started(make_lab(one=Candidate(scale=1.3), two=Candidate(scale=1.3)))
    for number, name in enumerate(("one", "two"), 1):
        trial = bench.trial(number, placement(name), "p")
        assert trial.race is not None
        assert trial.race.pairs > 0


def test_a_candidate_whose_layers_cannot_be_timed_is_raced_without_them(make_lab: MakeLab) -> None:
    """This happens if the runtime builds a large model again for its profile, which takes too long."""
    lab = make_lab(odd=Candidate(scale=0.5, fails=lambda where, _: where == "layers"))
    bench = started(lab)
    trial = bench.trial(1, placement("odd"), "p", profile=True)
    assert (trial.status, trial.incumbent, trial.layers) == ("ok", True, ())
    assert "layers were not timed: odd fails in layers" in trial.samples.notes
    assert [engine.name for engine in lab.open] == ["odd"]


def test_a_reference_whose_layers_cannot_be_timed_becomes_the_incumbent(make_lab: MakeLab) -> None:
    lab = make_lab()
    lab.candidates["reference"] = Candidate(fails=lambda where, _: where == "layers")
    trial = bench_of(lab).trial(0, REFERENCE, "pure", profile=True)
    assert (trial.status, trial.incumbent, trial.layers) == ("ok", True, ())


@pytest.mark.parametrize("stage", ["write", "build", "bind", "time"])
def test_a_candidate_that_fails_is_a_failed_trial(make_lab: MakeLab, stage: str) -> None:
    lab = make_lab(bad=Candidate(fails=lambda where, _: where == stage))
    bench = started(lab)
    trial = bench.trial(1, placement("bad"), "p", profile=True)
    assert (trial.status, trial.incumbent, trial.ratio) == ("failed", False, None)
    assert f"bad fails in {stage}" in (trial.error or "")
    assert "bad" not in {engine.name for engine in lab.open}
    assert bench.best == 1.0


def test_the_folder_of_the_candidates_is_not_in_the_message_of_a_failure(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    """It is a temporary folder, which does not exist any more when the journal is read."""
    lab = make_lab(odd=Candidate())
    candidate, build = tmp_path / "odd.onnx", lab.build

    def refuse(model: Path, options: BuildOptions) -> WatchedEngine:
        if model.name == "odd":
            raise BackendError(f"{candidate}: node 'n' is odd", where=candidate)
        return build(model, options)

    lab.build = refuse  # type: ignore[method-assign]  # one model is refused
    bench = started(lab, folder=tmp_path)
    trial = bench.trial(1, placement("odd"), "pure")
    assert trial.error == "odd.onnx: odd.onnx: node 'n' is odd"
    measured = bench.compare({"reference": REFERENCE, "tuned": placement("odd")})
    assert str(tmp_path) not in measured.failures["tuned"]


def test_the_incumbent_is_not_built_again_after_a_failed_build(make_lab: MakeLab) -> None:
    lab = make_lab(bad=Candidate(fails=lambda stage, _: stage == "build"), slow=Candidate(scale=1.5))
    bench = started(lab)
    bench.trial(1, placement("bad"), "p")
    bench.trial(2, placement("slow"), "p")
    assert lab.built == ["reference", "slow"]


def test_a_challenger_that_fails_in_its_race_is_a_failed_trial(make_lab: MakeLab) -> None:
    lab = make_lab(
        bad=Candidate(scale=0.7, fails=lambda stage, count: stage == "time" and count > 3),
        good=Candidate(scale=0.7),
    )
    bench = started(lab)
    trial = bench.trial(1, placement("bad"), "p")
    assert trial.error == "bad fails in time"
    assert bench.trial(2, placement("good"), "p").incumbent


def test_an_incumbent_that_fails_in_a_race_is_built_again_for_the_same_challenger(make_lab: MakeLab) -> None:
    lab = make_lab(good=Candidate(scale=0.7))
    bench = started(lab)
    lab.candidates["reference"].fails = lambda stage, count: stage == "time" and count == 4
    trial = bench.trial(1, placement("good"), "p")
    assert trial.ok
    assert trial.incumbent
    assert lab.built.count("reference") >= 2


def test_an_incumbent_that_cannot_be_built_again_is_named_in_the_error(make_lab: MakeLab) -> None:
    lab = make_lab(good=Candidate(scale=0.7))
    bench = bench_of(lab)
    bench.recall(known(REFERENCE, 1.0))
    lab.candidates["reference"].fails = lambda stage, _: stage == "build"
    trial = bench.trial(1, placement("good"), "p")
    assert trial.error == "reference fails in build"
    assert not lab.open


def test_a_candidate_with_a_graph_of_an_earlier_run_is_not_raced(make_lab: MakeLab) -> None:
    lab = make_lab(again=Candidate(graph="g"))
    bench = bench_of(lab)
    bench.recall(known(REFERENCE, 1.0, graph_hash="g"))
    trial = bench.trial(1, placement("again"), "p")
    assert trial.race is not None
    assert (trial.race.verdict, trial.race.opponent) == ("same graph", REFERENCE.digest)
    assert lab.built == ["again"]


def test_a_recorded_trial_without_a_time_gives_no_time(make_lab: MakeLab) -> None:
    """A block that was quantized alone to measure its SQNR may be a candidate later: a resumed run races it, too."""
    lab = make_lab(new=Candidate(scale=0.5, graph="g"))
    bench = bench_of(lab)
    bench.recall(known(REFERENCE, 1.0))
    bench.recall(replace(known(placement("new"), 1.0, graph_hash="g"), ratio=None, incumbent=False))
    trial = bench.trial(2, placement("new"), "refine")
    assert trial.race is not None
    assert trial.race.verdict == "faster"
    assert trial.ratio == pytest.approx(0.5, rel=0.1)


def test_an_incumbent_of_an_earlier_run_is_built_when_first_needed(make_lab: MakeLab) -> None:
    lab = make_lab(fast=Candidate(scale=0.5), faster=Candidate(scale=0.3))
    bench = bench_of(lab)
    bench.recall(known(REFERENCE, 1.0))
    bench.recall(known(placement("fast"), 0.5))
    assert not lab.built
    trial = bench.trial(2, placement("faster"), "p")
    assert trial.incumbent
    assert trial.race is not None
    assert trial.race.opponent == placement("fast").digest
    assert trial.ratio == pytest.approx(0.3, rel=0.1)


def test_other_exceptions_than_those_of_the_backend_propagate_and_no_engine_stays_open(
    make_lab: MakeLab,
) -> None:
    lab = make_lab(good=Candidate(scale=0.7))
    bench = started(lab)

    def full(_: object) -> Path:
        raise OutputError("no space left")

    def interrupt(stage: str, count: int) -> bool:
        if stage == "time" and count == 2:
            raise KeyboardInterrupt
        return False

    bench._write = full
    with pytest.raises(OutputError):
        bench.trial(1, placement("good"), "p")
    bench._write = lab.write
    lab.candidates["good"].fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.trial(1, placement("good"), "p")
    bench.close()
    assert not lab.open


def test_only_timing_locks_the_device(make_lab: MakeLab) -> None:
    events: list[str] = []

    @contextmanager
    def exclusive():
        events.append("in")
        yield
        events.append("out")

    lab = make_lab(good=Candidate(scale=0.7))
    plain_build = lab.build
    lab.build = lambda *a: (events.append("build"), plain_build(*a))[1]  # type: ignore[method-assign]
    started(lab, exclusive=exclusive)
    assert events == ["build", "in", "out"]


# ---- noise --------------------------------------------------------------------------------------


def test_eps_is_twice_the_deviation_between_builds(make_lab: MakeLab) -> None:
    found = []
    for seed in range(60):
        lab = make_lab({"fake.seed": str(seed), "fake.build_noise": "0.02", "fake.run_noise": "0"})
        bench = bench_of(lab, seed)
        bench.measure_noise(REFERENCE)
        found.append(bench.eps)
        assert not lab.open
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(0.04, rel=0.25)


@pytest.mark.parametrize(("deviation", "eps"), [(0.0, FLOOR_EPS), (0.02, 0.04), (0.7, MOST_EPS)])
def test_the_smallest_significant_difference_is_bounded(deviation: float, eps: float) -> None:
    """Builds that differ by a factor of two leave no significant gain, and no impossible one."""
    assert significant(deviation) == pytest.approx(eps)


def test_eps_is_never_below_one_per_cent(make_lab: MakeLab) -> None:
    bench = bench_of(make_lab(QUIET))
    samples = bench.measure_noise(REFERENCE)
    assert bench.eps == FLOOR_EPS
    assert len(samples.wall_ms) == NOISE_BUILDS * NOISE_ROUNDS // 2


@pytest.mark.parametrize(("seconds", "builds"), [(1e6, NOISE_BUILDS), (1e-9, 0)])
def test_the_measurement_of_noise_has_a_time_limit(make_lab: MakeLab, seconds: float, builds: int) -> None:
    lab = make_lab({"fake.build_noise": "0.03"})
    bench = bench_of(lab)
    bench.trial(0, REFERENCE, "pure")
    before = len(lab.built)
    bench.measure_noise(REFERENCE, seconds)
    assert len(lab.built) - before == builds
    assert bench.eps == ASSUMED_EPS or builds


def test_the_deviation_of_few_builds_is_rarely_far_from_the_true_one(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three builds alone, 22 % of estimates are half the true deviation or less, and 2 % twice as large or more."""
    monkeypatch.setattr(bench_module, "NOISE_BUILDS", FEW_BUILDS)
    found = []
    for seed in range(150):
        words = {"fake.seed": str(seed), "fake.build_noise": "0.02", "fake.run_noise": "0"}
        bench = bench_of(make_lab(words), seed)
        bench.measure_noise(REFERENCE)
        found.append(bench.eps)
    assert min(found) > 0.5 * 0.04
    assert np.mean(np.array(found) > 1.5 * 0.04) < 0.05


@pytest.mark.parametrize(
    ("run_noise", "fewer"), [(0.001, True), (0.1, False)], ids=["runs agree", "runs differ"]
)
def test_rounds_end_when_more_runs_add_no_information(
    make_lab: MakeLab, run_noise: float, fewer: bool
) -> None:
    """Further runs of the same builds add nothing to the deviation between builds. A drift is not a deviation."""
    words = {"fake.build_noise": "0.02", "fake.run_noise": str(run_noise), "fake.drift": "0.3"}
    lab = make_lab(words, fast=Candidate(scale=0.5))
    found = bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=24)
    assert found.median_ms("reference") / found.median_ms("tuned") == pytest.approx(found.speedup.median)
    taken = {len(samples.wall_ms) // found.builds for samples in found.samples.values()}
    assert taken == {12 if fewer else 24}


@pytest.mark.parametrize("stage", ["build", "bind", "time"])
def test_a_failed_second_build_in_the_measurement_of_noise_is_one_error(
    make_lab: MakeLab, stage: str
) -> None:
    lab = make_lab()
    lab.candidates["reference"].fails = lambda where, count: where == stage and count == 2
    with pytest.raises(BackendError, match="not again: reference fails"):
        bench_of(lab).measure_noise(REFERENCE)
    assert not lab.open


# ---- confirmation -------------------------------------------------------------------------------


def roles(**named: str):
    return {role: REFERENCE if name == "reference" else placement(name) for role, name in named.items()}


def test_confirmation_times_fresh_builds_of_every_role(make_lab: MakeLab) -> None:
    lab = make_lab(fast=Candidate(scale=0.5), slow=Candidate(scale=1.5))
    found = bench_of(lab).compare(roles(reference="reference", tuned="fast", everything="slow"), rounds=8)
    assert sorted(lab.built) == ["fast"] * 3 + ["reference"] * 3 + ["slow"] * 3
    assert not lab.open
    assert found.builds == 3
    assert {role: len(s.cpu_ms) for role, s in found.samples.items()} == dict.fromkeys(found.ratios, 24)
    assert found.ratios["tuned"].median == pytest.approx(0.5, rel=0.05)
    assert found.ratios["tuned"].low < found.ratios["tuned"].median < found.ratios["tuned"].high
    assert found.ratios["everything"].median == pytest.approx(1.5, rel=0.1)
    assert found.speedup.median == pytest.approx(2, rel=0.05)


def test_a_confirmation_is_repeated_with_other_builds_while_asked_for(make_lab: MakeLab) -> None:
    words = {"fake.build_noise": "0.02", "fake.run_noise": "0.01"}
    lab, seen = make_lab(words, fast=Candidate(scale=0.5)), list[RatioTest]()

    def again(ratios: Mapping[str, RatioTest]) -> bool:
        seen.append(ratios["tuned"])
        return len(seen) < 3

    found = bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=8, again=again)
    assert Counter(lab.built) == {"reference": 9, "fast": 9}
    assert not lab.open
    assert found.builds == 9
    assert found.tested["tuned"] == seen[-1]
    widths = [each.mean.high / each.mean.low for each in seen]
    assert widths[2] < widths[0]
    assert found.ratios["tuned"].median == pytest.approx(0.5, rel=0.03)
    assert any("measured 3 times" in note for note in found.samples["tuned"].notes)


def test_a_repetition_that_fails_leaves_the_measurement_before(make_lab: MakeLab) -> None:
    lab = make_lab(fast=Candidate(scale=0.5, fails=lambda stage, count: stage == "build" and count == 5))
    found = bench_of(lab).compare(
        roles(reference="reference", tuned="fast"), rounds=8, again=lambda ratios: True
    )
    assert found.builds == 3
    assert not found.failures


def test_a_runtime_without_processor_time_is_judged_by_elapsed_time(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FakeEngine.time
    monkeypatch.setattr(
        FakeEngine, "time", lambda *words, **more: replace(original(*words, **more), cpu_ms=())
    )
    found = bench_of(make_lab(fast=Candidate(scale=0.5))).compare(roles(reference="reference", tuned="fast"))
    assert found.clock == "wall"
    assert found.speedup.median == pytest.approx(2, rel=0.05)


def test_builds_for_noise_and_confirmation_share_no_cache(make_lab: MakeLab) -> None:
    """Only these: candidates of a search share a timing cache, so that equal parts have equal kernels."""
    lab = make_lab(QUIET, fast=Candidate(scale=0.5))
    bench = started(lab)
    assert bench.trial(1, placement("fast"), "p").incumbent
    assert not any(lab.fresh)
    searched = len(lab.fresh)
    bench.measure_noise(REFERENCE)
    bench.compare(roles(reference="reference", tuned="fast"), rounds=2)
    assert all(lab.fresh[searched:])
    assert lab.hashed == [not fresh for fresh in lab.fresh]
    assert len(lab.fresh) == searched + NOISE_BUILDS + 6


def test_equal_placements_share_their_builds(make_lab: MakeLab) -> None:
    lab = make_lab()
    found = bench_of(lab).compare(roles(reference="reference", tuned="reference"), rounds=4)
    assert len(lab.built) == 3
    assert (found.speedup.low, found.speedup.high) == (1, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stage", ["build", "bind", "time"])
def test_a_role_with_a_failed_build_is_omitted(make_lab: MakeLab, stage: str, count: int) -> None:
    lab = make_lab(fast=Candidate(scale=0.5), bad=Candidate())
    lab.candidates["bad"].fails = lambda where, nth: where == stage and nth == count
    named = roles(reference="reference", tuned="fast", everything="bad")
    found = bench_of(lab).compare(named, rounds=6)
    assert set(found.samples) == set(found.ratios) == {"reference", "tuned"}
    assert found.failures == {"everything": f"bad fails in {stage}"}
    assert not lab.open


def test_without_a_tuned_build_there_is_no_speedup(make_lab: MakeLab) -> None:
    lab = make_lab(bad=Candidate(fails=lambda stage, _: stage == "build"))
    found = bench_of(lab).compare(roles(reference="reference", tuned="bad"), rounds=4)
    assert set(found.samples) == {"reference"}
    assert (found.speedup.low, found.speedup.high) == (1, 1)


@pytest.mark.parametrize("stage", ["build", "time"])
def test_a_reference_that_fails_is_an_error_with_the_reason(make_lab: MakeLab, stage: str) -> None:
    lab = make_lab(fast=Candidate(scale=0.5))
    lab.candidates["reference"].fails = lambda where, count: where == stage and count == 3
    with pytest.raises(BackendError, match=f"again: reference fails in {stage}"):
        bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=6)
    assert not lab.open


# ---- false alarms and power of whole trials -----------------------------------------------------


def challenges(make_lab: MakeLab, scale: float, seeds: int) -> list[Trial]:
    """One challenge per simulated device with the noise and eps of a shared machine."""
    trials = []
    for seed in range(seeds):
        lab = make_lab({"fake.seed": str(seed)}, other=Candidate(scale=scale))
        bench = started(lab, seed)
        bench.measure_noise(REFERENCE)
        trials.append(bench.trial(1, placement("other"), "p"))
        assert len(lab.open) == 1
    return trials


def test_a_candidate_of_equal_speed_rarely_becomes_the_incumbent(make_lab: MakeLab) -> None:
    accepted = [trial.incumbent for trial in challenges(make_lab, 1.0, 300)]
    assert np.mean(accepted) <= 0.06  # 4 % over 1,500 seeds; 16 % without the second race


def test_a_candidate_ten_per_cent_faster_nearly_always_becomes_the_incumbent(make_lab: MakeLab) -> None:
    trials = challenges(make_lab, 0.9, 60)
    assert np.mean([trial.incumbent for trial in trials]) >= 0.95
    assert np.mean([trial.ratio for trial in trials]) == pytest.approx(0.9, abs=0.01)


# ---- parts of the model ---------------------------------------------------------------------------

PART = ("n1", "n2")


def with_parts(lab: Lab) -> Bench:
    """A bench that writes a float part as the candidate ``part``, and a part with pairs as that of the placement."""

    def extract(what: Placement, nodes: tuple[str, ...]) -> Part:
        if nodes != PART:
            raise BackendError("these nodes cannot be built alone")
        return Part(path=lab.write(what) if what.sites else Path("part"), loads=(Load(feeds=FEEDS),))

    return started(lab, extract=extract)


def part_of(bench: Bench, what: Placement, nodes: tuple[str, ...] = PART) -> Trial:
    return bench.trial(1, what, "isolated", profile=True, subgraph=nodes)


def test_a_part_is_raced_against_the_same_part_in_float(make_lab: MakeLab) -> None:
    lab = make_lab(QUIET, part=Candidate(scale=0.2), half=Candidate(scale=0.1))
    bench = with_parts(lab)
    floats, trial = part_of(bench, REFERENCE), part_of(bench, placement("half"))
    assert (floats.ratio, floats.race, floats.subgraph) == (1.0, None, PART)
    assert trial.ratio == pytest.approx(0.5)
    assert trial.race is not None
    assert trial.race.verdict == "faster"
    assert trial.layers
    assert [engine.name for engine in lab.open] == ["reference", "part"]
    bench.close()
    assert lab.open == []


def test_a_part_never_becomes_the_incumbent(make_lab: MakeLab) -> None:
    bench = with_parts(make_lab(QUIET, part=Candidate(), fast=Candidate(scale=0.1)))
    assert not part_of(bench, placement("fast")).incumbent
    assert bench.best == 1.0
    whole = bench.trial(2, placement("fast"), "pure")
    assert whole.incumbent
    assert whole.race is not None


def test_a_resumed_run_builds_the_float_part_when_needed(make_lab: MakeLab) -> None:
    lab = make_lab(QUIET, part=Candidate(), fast=Candidate(scale=0.5))
    bench = with_parts(lab)
    floats = Trial(number=1, phase="isolated", placement=REFERENCE, ratio=1.0, subgraph=PART)
    bench.recall(floats)
    assert part_of(bench, placement("fast")).ratio == pytest.approx(0.5)
    assert lab.built.count("part") == 1


def test_a_part_that_cannot_be_extracted_is_a_failed_trial(make_lab: MakeLab) -> None:
    lab = make_lab(part=Candidate())
    trial = part_of(with_parts(lab), REFERENCE, ("elsewhere",))
    assert not trial.ok
    assert "alone" in (trial.error or "")
    assert [engine.name for engine in lab.open] == ["reference"]


def test_no_engine_of_a_part_that_fails_in_its_race_stays_open(make_lab: MakeLab) -> None:
    lab = make_lab(part=Candidate(), weak=Candidate(fails=lambda stage, count: stage == "time" and count > 2))
    bench = with_parts(lab)
    part_of(bench, REFERENCE)
    assert not part_of(bench, placement("weak")).ok
    assert [engine.name for engine in lab.open] == ["reference"]
    lab.candidates["weak"] = Candidate()
    assert part_of(bench, placement("weak")).ok


# ---- separate build and measurement -----------------------------------------------------------------------


def test_a_candidate_can_be_measured_after_its_build(make_lab: MakeLab) -> None:
    lab = make_lab(QUIET, fast=Candidate(scale=0.5))
    bench = started(lab)
    built = bench.build(1, placement("fast"), "own")
    assert built.ok
    assert [engine.name for engine in lab.open] == ["reference", "fast"]
    assert bench.measure(built).incumbent
    assert [engine.name for engine in lab.open] == ["fast"]


def test_the_measurement_of_a_failed_build_is_a_failed_trial(make_lab: MakeLab) -> None:
    bench = started(make_lab(bad=Candidate(fails=lambda stage, count: stage == "build")))
    built = bench.build(1, placement("bad"), "own")
    assert not built.ok
    assert bench.measure(built) == built.trial
    assert not built.trial.ok


# ---- an assumed variation between builds ----------------------------------------------------------


def assuming(lab: Lab, eps: float) -> tuple[Bench, list[float]]:
    """A bench that assumes a variation, and the values of ``eps`` that are measured where its races ask for them."""
    bench, asked = started(lab), list[float]()

    def settle() -> None:
        assert [engine.name for engine in lab.open] == []  # the memory is free for the builds to measure
        asked.append(bench.eps)
        bench.eps, bench.settle = eps, None

    bench.eps, bench.settle = ASSUMED_EPS, settle
    return bench, asked


@pytest.mark.parametrize(("eps", "won"), [(0.01, True), (0.06, False)])
def test_the_variation_between_builds_is_measured_where_it_decides_a_race(
    make_lab: MakeLab, eps: float, *, won: bool
) -> None:
    bench, asked = assuming(make_lab(QUIET, a=Candidate(0.97)), eps)
    trial = bench.trial(1, placement("a"), "p")
    assert (asked, trial.incumbent, bench.eps) == ([ASSUMED_EPS], won, eps)
    assert trial.race is not None
    assert trial.race.ratio == pytest.approx(0.97)


@pytest.mark.parametrize(("scale", "won"), [(0.7, True), (0.995, False), (1.02, False)])
def test_a_clear_race_does_not_wait_for_the_variation_between_builds(
    make_lab: MakeLab, scale: float, *, won: bool
) -> None:
    bench, asked = assuming(make_lab(QUIET, a=Candidate(scale)), 0.01)
    assert bench.trial(1, placement("a"), "p").incumbent == won
    assert asked == []


@pytest.mark.parametrize(("second", "won"), [(0.97, True), (0.99, False)])
def test_the_second_race_is_for_what_makes_the_mean_gain_significant(
    make_lab: MakeLab, second: float, *, won: bool
) -> None:
    """The first race has a ratio of 0.92, and differences count from 5 %: together 0.97 is enough, 0.99 is not."""
    lab = make_lab(QUIET, a=Candidate(0.92))
    bench = started(lab)
    bench.eps = 0.05
    build = lab.build

    def slower(model: Path, options: BuildOptions) -> WatchedEngine:
        lab.candidates["a"].scale = 0.92 if "a" not in lab.built else second
        return build(model, options)

    lab.build = slower  # type: ignore[method-assign] # builds of one model that differ
    assert bench.trial(1, placement("a"), "p").incumbent == won


def test_all_data_is_run_on_several_engines_of_a_candidate(make_lab: MakeLab) -> None:
    """They are closed before others are timed."""
    several = list[bool]()

    def sqnr_db(engine: Runs) -> float:
        several.append(isinstance(engine, Engines))
        return 30.0

    lab = make_lab(QUIET, a=Candidate(0.7))
    bench = started(lab, admission=Admission(sqnr_db, 20.0), engines=2)
    assert bench.trial(1, placement("a"), "p").incumbent
    assert several == [True, True]
    assert [engine.name for engine in lab.open] == ["a"]
    alone = started(make_lab(QUIET), admission=Admission(sqnr_db, 20.0), engines=2, memory=lambda *_: False)
    assert several.pop() is False
    alone.close()
