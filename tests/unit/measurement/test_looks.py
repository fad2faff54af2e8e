"""Looks (timings of reference and incumbent from time to time): when they are taken, and the coverage of intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import OPTIONS, FakeDevice, FakeEngine
from qdqspec.errors import BackendError
from qdqspec.search.base import Proposal
from qdqspec.search.loop import Contest
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load
from qdqspec.timing.stats import time_deviation
from qdqspec.types import Interval, LayerTime
from tests.support.lab import REFERENCE, placement

TUNED = placement("tuned")
RATIO = 0.7
STEADY = {"fake.run_noise": "0.01", "fake.build_noise": "0.005"}
STATES = {**STEADY, "fake.state": "0.04", "fake.state_period": "20"}


class TwoModels(FakeDevice):
    """A model of 26 ms in float and of ``RATIO`` of that in integers, whose builds are counted and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[str] = []
        self.is_broken = False

    def build(self, model: Path, options: BuildOptions) -> FakeEngine:
        if self.is_broken:
            raise BackendError("no engine")
        words = OPTIONS.of(options.extra)
        self.built.append(model.name)
        self.pass_time(200)
        milliseconds = 26.0 * (RATIO if model.name == "tuned" else 1.0)
        is_tuned = model.name == "tuned"
        layer = LayerTime(name="conv", op_type="Conv", milliseconds=milliseconds, integer=is_tuned)
        random = np.random.default_rng([words.seed, len(self.built)])
        return FakeEngine(self, model, words, (layer,), model.name, ("x",), random)

    @property
    def seconds(self) -> float:
        return self._now_ms / 1e3


class Lab(Contest):
    """A contest on the simulated device with looks; the time is that of the device."""

    def __init__(self, seed: int, words: dict[str, str]) -> None:
        self.device, random = TwoModels(), np.random.default_rng(seed)
        self.bench = Bench(
            self.device,
            lambda placement: Path("tuned" if placement.sites else "reference"),
            (Load(feeds={"x": np.zeros(1, np.float32)}),),
            clock="cpu",
            random=random,
            options=BuildOptions(extra={**words, "fake.seed": str(seed)}),
            looks=True,
            now=lambda: self.device.seconds,
            memory=lambda *_: True,
        )
        super().__init__(self.bench)

    def search(self, trials: int, apart: float = 15.0) -> None:
        """The reference, a winner, and trials of the same graph, which is not raced again, each some seconds later."""
        for number, what in enumerate([REFERENCE, *[TUNED] * (1 + trials)]):
            self.device.pass_time(1e3 * apart * (number > 1))
            self.measure(self.build(number, Proposal(placement=what, phase="pure")))

    def claim(self) -> Interval:
        return self.bench.compare({"reference": REFERENCE, "tuned": TUNED}).ratios["tuned"]


def covered(words: dict[str, str], trials: int, seeds: int = 40) -> float:
    """The share of reported intervals that contain the true ratio, after searches of a number of trials."""
    inside = 0
    for seed in range(seeds):
        lab = Lab(seed, words)
        lab.search(trials)
        found = lab.claim()
        inside += found.low <= RATIO <= found.high
    return inside / seeds


def test_intervals_cover_the_true_ratio_on_a_device_with_long_states() -> None:
    lab = Lab(0, STATES)
    lab.search(2)
    assert time_deviation(lab.bench.series)[1] < 3  # too few looks to estimate the states
    before = lab.device.seconds
    lab.claim()
    assert lab.device.seconds - before < 20  # shorter than a state
    assert covered(STATES, 0) <= 0.6  # from one time, with the usual deviation
    assert covered(STATES, 12) >= 0.95


def test_looks_take_a_twentieth_of_the_time_and_keep_one_engine() -> None:
    lab = Lab(0, STEADY)
    lab.search(40, apart=1.0)
    looks = sum(map(len, lab.bench.series))
    assert 2 <= looks <= lab.device.seconds / 5
    assert lab.bench.look_seconds * 20 < 60
    assert lab.device.built.count("reference") == 2  # first trial, looks
    lab.bench.close()
    assert lab.bench.beside is None


def test_an_engine_that_fails_in_a_look_does_not_end_the_search() -> None:
    lab = Lab(0, STEADY)
    lab.search(0)
    lab.device.pass_time(6e4)
    lab.device.is_broken = True
    lab.bench.look()
    lab.device.is_broken = False
    lab.device.pass_time(6e4)
    lab.bench.look()
    assert lab.bench.beside is not None
