"""Races on the simulated device: verdicts, stopping rules, and error rates. Several shape profiles as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model
from qdqspec.timing.race import (
    MOST_RUNS,
    Load,
    Turn,
    as_one,
    attach,
    merged_layers,
    race,
    warmed,
)
from qdqspec.timing.stats import signed_rank_bounds
from qdqspec.types import LayerTime, Race, Samples

SAME_SPEED = {"fake.build_noise": "0"}  # builds of one model have equal speed: only run noise remains


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("race") / "model.onnx"
    onnx.save(small_model(), path)
    return path


def engine(device: FakeDevice, model: Path, seed: int, **words: str) -> FakeEngine:
    extra = {"fake.seed": str(seed), **SAME_SPEED, **{f"fake.{k}": v for k, v in words.items()}}
    built = device.build(model, BuildOptions(extra=extra))
    built.bind({"x": np.zeros((1, 3, 8, 8), np.float32)})
    return built


def raced(model: Path, seed: int, scale: float, *, eps: float = 0.02, clock="cpu", **words: str):
    device = FakeDevice()
    incumbent = engine(device, model, seed, **words)
    challenger = engine(device, model, seed, scale=str(scale), **words)
    random = np.random.default_rng(seed)
    return race(challenger, incumbent, "incumbent", clock=clock, eps=eps, random=random)


def verdicts(model: Path, scale: float, seeds: int = 100, **more) -> list[Race]:
    return [raced(model, seed, scale, **more)[0] for seed in range(seeds)]


def share(races: list[Race], verdict: str) -> float:
    return float(np.mean([found.verdict == verdict for found in races]))


@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_a_difference_of_ten_per_cent_is_found(model: Path, clock: str) -> None:
    assert share(verdicts(model, 0.9, clock=clock), "faster") >= 0.97
    lost = verdicts(model, 1.1, clock=clock)
    assert share(lost, "slower") >= 0.8  # the other races are given up before significance
    assert share(lost, "faster") == 0


def test_a_difference_below_eps_does_not_win(model: Path) -> None:
    assert share(verdicts(model, 0.97, eps=0.06), "faster") == 0
    equal = verdicts(model, 1.0, drift="0.3", drift_period="0.05")
    assert share(equal, "no difference") >= 0.97, "drift of the machine is no difference"
    assert share(verdicts(model, 0.96, eps=0.02), "faster") >= 0.9, "twice eps"


@pytest.mark.parametrize("scale", [1.0, 1.03])
def test_a_race_that_can_no_longer_be_won_ends_between_looks(model: Path, scale: float) -> None:
    """It ends when the rank test makes a gain of eps unlikely; more pairs would not change the verdict."""
    eps = 0.02
    found = verdicts(model, scale, eps=eps, seeds=40)
    lost = [race for race in found if 6 <= race.pairs < 48 and race.verdict != "faster"]
    assert len(lost) >= 30
    assert all(race.interval is not None for race in lost)
    assert all(race.interval.median > 1 - eps or race.verdict == "slower" for race in lost if race.interval)
    assert np.median([race.pairs for race in found]) <= 12


def test_the_interval_is_that_of_the_pairs_and_needs_six(model: Path) -> None:
    outcome, ours, theirs = raced(model, 0, 0.9)
    assert len(ours.cpu_ms) == len(theirs.cpu_ms) == len(theirs.wall_ms) == outcome.pairs
    assert outcome.ratio == pytest.approx(0.9, rel=0.05)
    assert outcome.interval.low <= outcome.ratio <= outcome.interval.high < 1
    logs = np.log(np.asarray(ours.cpu_ms) / np.asarray(theirs.cpu_ms))
    bounds = signed_rank_bounds(logs)
    assert outcome.interval.high == pytest.approx(math.exp(bounds.high))
    far_slower = verdicts(model, 1.6, seeds=40)
    assert {(race.verdict, race.pairs) for race in far_slower} == {("slower", 6)}


@pytest.mark.parametrize(
    ("typical_ms", "warmup", "runs"), [(0.01, 5, 5), (1.0, 5, 3), (29.0, 1, 1), (900.0, 0, 1)]
)
def test_turns_of_any_model_have_a_similar_duration(typical_ms: float, warmup: int, runs: int) -> None:
    """Untimed runs until the caches are warm again, then a few timed ones; for long models one timed run.

    A model of 29 ms took 1.00 of float in the first run of a turn, and .90 in each later one.
    """
    assert Turn.lasting(typical_ms) == Turn(warmup=warmup, runs=runs)


class Timed:
    """An engine timed by a function of the untimed and the timed runs so far; it notes how many runs were asked for."""

    def __init__(self, wall_ms: Callable[[int, int], tuple[float, ...]], cpu_ms: float | None = None) -> None:
        self.wall_ms, self.cpu_ms, self.asked = wall_ms, cpu_ms, list[tuple[int, int]]()

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        before = sum(map(sum, self.asked))
        self.asked.append((warmup, runs))
        wall = self.wall_ms(before + warmup, before + warmup + runs)
        return Samples(wall_ms=wall, cpu_ms=wall if self.cpu_ms is None else (self.cpu_ms,) * runs)


@pytest.mark.parametrize(("warmup", "asked", "first"), [(5, ("own", 3, 5), 1.5), (4, (7,), 1), (0, (4,), 1)])
def test_a_first_run_is_after_another_model(warmup: int, asked: tuple[object, ...], first: float) -> None:
    """The time that a process needs to continue after waiting is not part of a latency; in a long run it is
    negligible."""
    seen: list[tuple[object, ...]] = []

    class Own:
        def time(self, runs: int, warmup: int = 0) -> Samples:
            seen.append((runs,))
            return Samples(wall_ms=(1.0,) * runs)

        def time_after_another(self, runs: int, warmup: int) -> Samples:
            seen.append(("own", runs, warmup))
            return Samples(wall_ms=(1.5,) + (1.0,) * runs)

    taken = Turn(warmup=warmup, runs=3).both(cast("Engine", Own()))
    assert (seen, taken.first.wall_ms, taken.wall_ms) == ([asked], (first,), (1.0,))


@pytest.mark.parametrize(
    ("times", "runs"),
    [
        ((30.0, 30.1), 3),  # the first run is as fast as the later ones
        ((40.0, 30.0, 30.0), 4),
        ((40.0, 37.0, 34.0, 31.0, 29.0, 29.0), MOST_RUNS + 2),  # still decreasing: the limit of runs
        ((0.2, 0.1), 1 + MOST_RUNS - 1 + 3),  # too short to check each run
    ],
)
def test_a_fresh_engine_is_warmed_up_until_its_times_settle(times: tuple[float, ...], runs: int) -> None:
    engine = Timed(lambda begin, end: (times + times[-1:] * 20)[begin:end])
    last = warmed(cast("Engine", engine), "cpu")
    assert sum(map(sum, engine.asked)) == runs
    assert last.median_ms("cpu") == pytest.approx(times[-1], rel=0.01)


# ---- several shape profiles as one objective ------------------------------------------------------------

times = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=5), st.floats(0.05, 0.95))
def test_the_ratio_of_means_is_the_mean_of_ratios(rows, share):
    """Units and sizes of profiles have no effect: each ratio is weighted by its share."""
    ours = as_one([Samples(wall_ms=tuple(r[i] for r in rows)) for i in (0, 1)], (share, 1 - share))
    theirs = as_one([Samples(wall_ms=tuple(r[i] for r in rows)) for i in (2, 3)], (share, 1 - share))
    for (a, b, c, d), mine, other in zip(rows, ours.wall_ms, theirs.wall_ms, strict=True):
        assert mine / other == pytest.approx((a / c) ** share * (b / d) ** (1 - share))


def test_layers_of_profiles_are_weighted_as_in_the_objective():
    def layers(conv: float, relu: float) -> tuple[LayerTime, ...]:
        return (
            LayerTime(name="c", op_type="Conv", milliseconds=conv, nodes=("conv",)),
            LayerTime(name="r", op_type="Relu", milliseconds=relu, nodes=("relu",)),
            LayerTime(name="r2", op_type="Relu", milliseconds=relu, nodes=("relu",)),
        )

    found = merged_layers([layers(2.0, 1.0), layers(10.0, 45.0)], (0.75, 0.25))
    whole = 4.0**0.75 * 100.0**0.25
    assert [layer.milliseconds for layer in found] == pytest.approx(
        [whole * (0.75 * 0.5 + 0.25 * 0.1), *[whole * (0.75 * 0.25 + 0.25 * 0.45)] * 2]
    )
    assert merged_layers([(), ()], (0.5, 0.5)) == ()


def test_an_engine_that_cannot_be_bound_is_closed(model: Path, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self))
    engine = FakeDevice().build(model, BuildOptions())
    bound = Load(feeds={"x": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(BackendError, match="no value is given"):
        attach(engine, (bound, Load(feeds={})))
    assert closed == [engine]
