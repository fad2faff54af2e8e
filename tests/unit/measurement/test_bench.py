"""The bench on the simulated device: the noise of builds, and the comparison of fresh builds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec.backends.fake.engine import FakeEngine
from qdqspec.errors import BackendError
from qdqspec.timing.bench import FLOOR_EPS, significant
from qdqspec.types import RatioTest, Samples
from tests.support.lab import (
    QUIET,
    REFERENCE,
    Candidate,
    MakeLab,
    bench_of,
    known,
    lab_in,
    placement,
    started,
)


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    return lab_in(tmp_path)


# ---- noise --------------------------------------------------------------------------------------


BUILDS, ROUNDS = 5, 12
MADE = known(REFERENCE, 1.0, samples=Samples(wall_ms=(1.0, 1.0)), build_seconds=0.01)


@pytest.mark.parametrize(("deviation", "eps"), [(0.0, FLOOR_EPS), (0.02, 0.04), (0.7, 0.5)])
def test_the_smallest_significant_difference_is_bounded(deviation: float, eps: float) -> None:
    """Builds that differ by a factor of two leave no significant gain, and no impossible one."""
    assert significant(deviation) == pytest.approx(eps)


@pytest.mark.parametrize(("seconds", "builds"), [(1e6, BUILDS), (1e-9, 0)])
def test_the_measurement_of_noise_has_a_time_limit(make_lab: MakeLab, seconds: float, builds: int) -> None:
    lab = make_lab({"fake.build_noise": "0.03"})
    eps, _ = bench_of(lab).measure_noise(MADE, seconds)
    assert len(lab.built) == builds
    assert eps == 0.05 or builds


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
    arena = started(lab)
    assert arena.trial(1, placement("fast"), "p").incumbent
    assert not any(lab.fresh)
    searched = len(lab.fresh)
    arena.measure_noise(MADE)
    arena.bench.compare(roles(reference="reference", tuned="fast"), rounds=2)
    assert all(lab.fresh[searched:])
    assert lab.hashed == [not fresh for fresh in lab.fresh]
    assert len(lab.fresh) == searched + BUILDS + 6


@pytest.mark.parametrize(("stage", "count"), [("build", 1), ("bind", 2), ("time", 3)])
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
    lab.candidates["reference"].fails = lambda where, count: where == stage and count >= 2
    with pytest.raises(BackendError, match=f"again: reference fails in {stage}"):
        bench_of(lab).compare(roles(reference="reference", tuned="fast"), rounds=6)
    with pytest.raises(BackendError, match="not again: reference fails"):
        bench_of(lab).measure_noise(MADE)
    assert not lab.open
