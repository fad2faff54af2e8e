"""A simulated backend for tests: candidates by name, whose builds and open engines are counted, and a contest on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from qdqspec._core.arrays import Array
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.search.base import Proposal
from qdqspec.search.confirmation import Confirmation
from qdqspec.search.limits import Limits
from qdqspec.search.loop import Built, Contest
from qdqspec.testing.backends import small_model
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load
from qdqspec.types import Consumer, LayerTime, Placement, Samples, SearchLimits, Site, Trial

FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}
QUIET = {"fake.run_noise": "0", "fake.wall_noise": "0", "fake.build_noise": "0"}
REFERENCE = Placement(sites=frozenset())
NO_LIMITS = SearchLimits(min_sqnr_db=None)


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


def lab_in(folder: Path) -> MakeLab:
    """``make(fast=Candidate(scale=0.8))``: these candidates and a reference of scale 1."""
    file = folder / "model.onnx"
    onnx.save(small_model(), file)

    def make(words: Mapping[str, str] | None = None, **candidates: Candidate) -> Lab:
        return Lab({"reference": Candidate(), **candidates}, words or {}, file=file)

    return make


def raising(error: BaseException, stage: str, nth: int) -> Callable[[str, int], bool]:
    """A failure of a candidate when it reaches a stage for the nth time."""

    def fails(where: str, count: int) -> bool:
        if (where, count) == (stage, nth):
            raise error
        return False

    return fails


def bench_of(lab: Lab, seed: int = 0, **more) -> Bench:
    return Bench(
        lab, lab.write, (Load(feeds=FEEDS),), clock="cpu", random=np.random.default_rng(seed), **more
    )


class Arena(Contest):
    """A contest on a bench of a lab."""

    def __init__(self, lab: Lab, seed: int = 0, limits: Limits | None = None, **more) -> None:
        self.bench = bench_of(lab, seed, **more)
        super().__init__(self.bench, limits or Limits(asked=NO_LIMITS))

    def trial(self, number: int, what: Placement, phase: str, **how) -> Trial:
        return self.measure(self.built(number, what, phase, **how))

    def admits(self, what: Placement) -> bool:
        return Confirmation((), self.bench, self.limits).admits(what)

    def built(self, number: int, what: Placement, phase: str, **how) -> Built:
        return self.build(number, Proposal(placement=what, phase=phase, **how))


def known(what: Placement, ratio: float, **more) -> Trial:
    """A trial of an earlier run, which won its race."""
    return Trial(number=0, phase="p", placement=what, ratio=ratio, incumbent=True, **more)


def started(lab: Lab, seed: int = 0, **more) -> Arena:
    arena = Arena(lab, seed, **more)
    assert arena.trial(0, REFERENCE, "pure").incumbent
    return arena
