"""The bench on the simulated device: the noise of builds, and fresh builds in much or little memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from qdqspec._core.config import Settings
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeEngine
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.timing.bench import Bench
from qdqspec.timing.stats import drift
from qdqspec.timing.together import NOTE, FreshBuilds, Together, merged
from qdqspec.types import RatioTest, Samples
from tests.support.lab import (
    QUIET,
    REFERENCE,
    Candidate,
    Lab,
    MakeLab,
    WatchedEngine,
    bench_of,
    known,
    lab_in,
    placement,
    raising,
    started,
)


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    return lab_in(tmp_path)


# ---- noise --------------------------------------------------------------------------------------


BUILDS, ROUNDS = 5, 6
MADE = known(REFERENCE, 1.0, samples=Samples(wall_ms=(1.0, 1.0)), build_seconds=0.01)


@pytest.mark.parametrize(
    ("build_noise", "seconds", "eps", "builds"),
    [("0", 1e6, Bench.floor_eps, BUILDS), ("0.9", 1e6, 0.5, BUILDS), ("0.03", 1e-9, 0.05, 0)],
)
def test_the_smallest_significant_difference_has_bounds_and_a_time_limit(
    make_lab: MakeLab, build_noise: str, seconds: float, eps: float, builds: int
) -> None:
    """Builds that differ by a factor of two leave no significant gain, and no impossible one."""
    lab = make_lab({**QUIET, "fake.build_noise": build_noise})
    assert bench_of(lab).measure_variation(MADE, seconds)[0] == eps
    assert len(lab.built) == builds


# ---- confirmation -------------------------------------------------------------------------------


def roles(**named: str):
    return {role: REFERENCE if name == "reference" else placement(name) for role, name in named.items()}


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


def test_a_runtime_without_processor_time_is_judged_by_elapsed_time(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = FakeEngine.time
    monkeypatch.setattr(FakeEngine, "time", lambda *each, **more: replace(own(*each, **more), cpu_ms=()))
    found = bench_of(make_lab(fast=Candidate(scale=0.5))).compare(roles(reference="reference", tuned="fast"))
    assert found.clock == "wall"
    assert found.speedup.median == pytest.approx(2, rel=0.05)


def test_builds_for_noise_and_confirmation_share_no_cache(make_lab: MakeLab) -> None:
    """Only these: candidates of a search share a timing cache, so that equal parts have equal kernels."""
    lab = make_lab(QUIET, fast=Candidate(scale=0.5), slow=Candidate(scale=1.5))
    arena = started(lab)
    assert arena.trial(1, placement("fast"), "p").incumbent
    assert not any(lab.fresh)
    searched = len(lab.fresh)
    arena.measure_variation(MADE)
    found = arena.bench.compare(roles(reference="reference", tuned="fast", everything="slow"), rounds=6)
    assert all(lab.fresh[searched:])
    assert lab.hashed == [not fresh for fresh in lab.fresh]
    assert len(lab.fresh) == searched + BUILDS + 9
    assert Counter(lab.built[searched + BUILDS :]) == {"reference": 3, "fast": 3, "slow": 3}
    assert found.builds == 3
    assert {role: len(s.cpu_ms) for role, s in found.samples.items()} == dict.fromkeys(found.ratios, 18)
    medians = [found.ratios["tuned"].median, found.ratios["everything"].median, found.speedup.median]
    assert medians == pytest.approx([0.5, 1.5, 2.0])


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize(
    ("role", "stage", "count"),
    [("everything", "build", 1), ("everything", "bind", 2), ("everything", "time", 3), ("tuned", "build", 1)],
)
def test_a_role_with_a_failed_build_is_omitted(
    make_lab: MakeLab, role: str, stage: str, count: int, jobs: int
) -> None:
    lab = make_lab(fast=Candidate(scale=0.5), bad=Candidate())
    lab.candidates["bad"].fails = lambda where, nth: where == stage and nth == count
    named = {**roles(reference="reference", tuned="fast"), **roles(**{role: "bad"})}
    found = bench_of(lab, jobs=jobs).compare(named, rounds=6)
    assert set(found.samples) == set(found.ratios) == {"reference", "tuned"} - {role}
    assert found.failures == {role: f"bad fails in {stage}"}
    assert (found.speedup.median == 1) == (role == "tuned")
    assert not lab.open


# ---- memory for two engines at a time ---------------------------------------------------------------


class Crowded(Lab):
    """A device with memory for ``fit`` engines, which fails with the message of a runtime."""

    fit, most = 2, 0

    def build(self, model, options: BuildOptions) -> WatchedEngine:
        if len(self.open) >= self.fit:
            raise BackendError(f"{model.name}: CUDA failure 2: out of memory")
        engine = super().build(model, options)
        self.most = max(self.most, len(self.open))
        return engine


def crowded(lab: Lab, fit: int = 2) -> Crowded:
    found = Crowded(lab.candidates, lab.words, file=lab.file)
    found.fit = fit
    return found


def no_memory(_engines: object, _more: int) -> bool:
    return False


@pytest.mark.parametrize("memory_is_known", [True, False], ids=["memory is known", "a build fails"])
def test_at_most_two_engines_are_open(make_lab: MakeLab, memory_is_known: bool) -> None:
    lab = crowded(make_lab(fast=Candidate(scale=0.5), slow=Candidate(scale=1.5)))
    arena = started(lab, memory=no_memory) if memory_is_known else started(lab)
    samples = arena.measure_variation(MADE)
    assert lab.open == []  # the incumbent was closed
    assert samples.notes == (NOTE,)
    assert len(samples.on("cpu")) == len(samples.wall_ms) == BUILDS * ROUNDS
    assert arena.trial(1, placement("fast"), "pure").incumbent
    found = arena.bench.compare(roles(reference="reference", tuned="fast", everything="slow"), rounds=8)
    assert (lab.most, lab.open) == (2, [])
    taken = {role: len(s.wall_ms) for role, s in found.samples.items()}
    assert taken == dict.fromkeys(found.ratios, 24)  # three builds, eight rounds
    assert all(s.first and len(s.first.wall_ms) == len(s.wall_ms) for s in found.samples.values())
    assert found.ratios["tuned"].median == pytest.approx(0.5, rel=0.05)
    assert found.ratios["everything"].median == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    ("fit", "stage", "reason"),
    [
        (9, "build", "reference fails in build"),
        (9, "time", "reference fails in time"),
        (0, "", ".*out of memory"),
        (1, "", ".*out of memory"),
    ],
)
def test_a_reference_that_fails_or_finds_no_memory_is_one_error_with_the_reason(
    make_lab: MakeLab, fit: int, stage: str, reason: str
) -> None:
    lab = crowded(make_lab(fast=Candidate(scale=0.5)), fit)
    lab.candidates["reference"].fails = lambda where, count: where == stage and count >= 2
    with pytest.raises(BackendError, match=f"could not be built and run again: {reason}"):
        bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=6)
    with pytest.raises(BackendError, match=f"not again: {reason}"):
        bench_of(lab).measure_variation(MADE)
    assert not lab.open


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_no_candidate_fails_if_memory_runs_out_while_timing(make_lab: MakeLab, nth: int) -> None:
    """Engines allocate memory in their first runs, and the killed engine need not be the one that allocated."""
    killed = BackendError("killed by SIGKILL (often: the machine ran out of memory)")
    lab = make_lab(fast=Candidate(scale=0.5, fails=raising(killed, "time", nth)))
    found = bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=6)
    assert not found.failures
    assert found.samples["tuned"].notes == (NOTE,)
    assert not lab.open


@pytest.mark.parametrize(("stage", "nth"), [("build", 2), ("time", 1), ("time", 12)])
def test_no_engine_stays_open_after_an_interrupt(make_lab: MakeLab, stage: str, nth: int) -> None:
    lab = make_lab()
    lab.candidates["reference"].fails = raising(KeyboardInterrupt(), stage, nth)
    with pytest.raises(KeyboardInterrupt):
        bench_of(lab, memory=no_memory).measure_variation(MADE)
    assert not lab.open


class Steady:
    """An engine whose runs take ``level`` milliseconds, and twice as long after 140 turns of all."""

    def __init__(self, level: float, turns: Iterator[int]) -> None:
        self.level, self.turns = level, turns

    def time(self, runs: int, warmup: int = 0) -> Samples:
        took = self.level * (1.0 if next(self.turns) <= 140 else 2.0)
        return Samples(wall_ms=(took,) * runs, cpu_ms=(took * 0.9,) * runs)

    def close(self) -> None:
        pass


def test_a_change_of_machine_speed_between_builds_does_not_affect_samples() -> None:
    """The machine is twice as slow from the turns of the sixth build on; its samples are not slower than the others."""
    turns = count(1)
    fresh = FreshBuilds(clock="wall", random=np.random.default_rng(0), exclusive=nullcontext)
    groups = {"a": [partial(Steady, 5.0, turns)] * 3, "b": [partial(Steady, 4.0, turns)] * 3}
    found = fresh.two_at_a_time(groups, 12).samples
    builds = [build.wall_ms for group in found.values() for build in group]
    levels = [np.median(times) for times in builds]
    assert np.allclose(np.divide(levels, levels[0]), [1, 1, 1, 0.8, 0.8, 0.8])
    assert drift(builds) == pytest.approx(0, abs=1e-9)
    assert levels[0] == 5.0  # the median time of the reference
    assert np.allclose(found["b"][0].cpu_ms, np.multiply(found["b"][0].wall_ms, 0.9))


# ---- builds at the same time --------------------------------------------------------------------------


WAIT = 30.0  # time limit of a test in seconds; nothing is timed


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_builds_as_jobs_are_made_in_parallel(make_lab: MakeLab, jobs: int) -> None:
    begun, ended = threading.Barrier(jobs, timeout=WAIT), threading.Barrier(jobs, timeout=WAIT)
    under_way, most = list[None](), list[int]()

    def meet(stage: str, count: int) -> bool:
        assert stage != "time" or not under_way, "timed during a build"
        if stage == "build":
            under_way.append(None)
            begun.wait()
            most.append(len(under_way))
            ended.wait()
            under_way.pop()
        return False

    lab = make_lab(fast=Candidate(fails=meet))
    lab.candidates["reference"].fails = meet
    found = bench_of(lab, jobs=jobs).compare(roles(reference="reference", tuned="fast"), rounds=6)
    assert most == [jobs] * 6
    assert (found.builds, found.failures, lab.open) == (3, {}, [])


def test_an_interrupt_does_not_wait_for_a_build() -> None:
    """Ctrl-C must end the search even if a compiler hangs."""
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> Steady:
        begun.set()
        release.wait(WAIT)
        ended.set()
        raise BackendError("too late")

    def interrupt() -> Steady:
        begun.wait(WAIT)
        raise KeyboardInterrupt

    fresh = FreshBuilds(clock="wall", random=np.random.default_rng(0), exclusive=nullcontext, jobs=2)
    with pytest.raises(KeyboardInterrupt):
        fresh.all_at_once({"a": [interrupt, hang]}, 6)
    assert not ended.is_set()
    release.set()
    assert ended.wait(WAIT)


def test_builds_that_time_kernels_are_sequential() -> None:
    """At any number of jobs: parallel builds would affect each other's choice of kernels."""
    from qdqspec.backends.tensorrt.engine import TensorRt
    from qdqspec.backends.trtexec.engine import Trtexec

    for backend, jobs in ((OnnxRuntime(), 4), (TensorRt(), 1), (Trtexec(), 1)):
        work = Resources(backend=backend, options=BuildOptions(), settings=Settings(jobs=4))
        assert work.jobs == jobs, backend.name


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 6), (1e9, 24)])
def test_slow_models_have_fewer_rounds(seconds: float, rounds: int) -> None:
    how = {"random": np.random.default_rng(0), "exclusive": nullcontext, "most_seconds": seconds}
    found = FreshBuilds(clock="wall", **how).all_at_once({"a": [partial(Steady, 1.0, count(1))] * 2}, 24)
    assert [len(build.wall_ms) for build in found.samples["a"]] == [rounds, rounds]


def test_later_measurements_are_scaled_to_the_rounds_of_the_first() -> None:
    """The second measurement is slower by a factor of its own in each round; the ratios within it are kept."""

    def measured(slower: tuple[float, ...], **levels: float) -> Together:
        times = {name: tuple(level * each for each in slower) for name, level in levels.items()}
        return Together({name: [Samples(wall_ms=each)] for name, each in times.items()})

    found = merged([measured((1, 2, 1), a=1, b=4), measured((3, 5, 7, 9), a=2, b=2)])
    assert found.measurements == 2
    times = {name: [build.wall_ms for build in builds] for name, builds in found.samples.items()}
    assert times["a"] == [(1, 2, 1), pytest.approx((2, 4, 2))]
    assert times["b"] == [(4, 8, 4), pytest.approx((2, 4, 2))]
    notes = {note for builds in found.samples.values() for build in builds for note in build.notes}
    assert notes == {"measured 2 times; later times are scaled to the first"}
