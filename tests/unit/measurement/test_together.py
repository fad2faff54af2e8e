"""Builds that are timed together: how many run in parallel, and that none is timed before all are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest

from qdqspec._core.config import Settings
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.timing.together import FreshBuilds, Together, merged
from qdqspec.types import Samples

WAIT = 30.0  # time limit of a test in seconds; nothing is timed


@dataclass
class Site:
    """Counts parallel builds and closed engines."""

    wanted: int
    meet: Callable[[], object] = lambda: None
    under_way: int = 0
    most: int = 0
    open: list[object] = field(default_factory=list)
    closed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def build(self) -> Engine:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self.meet()
        with self.lock:
            self.under_way -= 1
            engine = Engine(self)
            self.open.append(engine)
        return engine

    def fail(self) -> Engine:
        self.meet()
        raise BackendError("it does not build")


@dataclass(eq=False)
class Engine:
    site: Site

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        assert len(self.site.open) == self.site.wanted, "timed during a build"
        return Samples(wall_ms=(1.0,) * runs)

    def close(self) -> None:
        self.site.closed += 1


def timed(groups, jobs: int) -> Together:
    random = np.random.default_rng(0)
    builds = FreshBuilds(clock="wall", random=random, exclusive=nullcontext, jobs=jobs)
    return builds.all_at_once(groups, 6)


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (3, 3)])
def test_the_number_of_parallel_builds_is_limited_by_jobs(jobs: int, most: int) -> None:
    site = Site(wanted=3)
    if jobs > 1:
        site.meet = threading.Barrier(jobs, timeout=WAIT).wait
    found = timed({"a": [site.build] * 3}, jobs)
    assert (site.most, site.closed) == (most, 3)
    assert len(found.samples["a"]) == 3
    assert not found.failures


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_group_with_a_failed_build_is_excluded_and_its_engines_are_closed(jobs: int) -> None:
    site = Site(wanted=5 if jobs > 1 else 4)
    found = timed({"a": [site.build, site.fail, site.build], "b": [site.build] * 3}, jobs)
    assert found.failures.keys() == {"a"}
    assert found.samples.keys() == {"b"}
    assert site.closed == len(site.open) == site.wanted


def test_an_interrupt_does_not_wait_for_a_build() -> None:
    """Ctrl-C must end the search even if a compiler hangs."""
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> Engine:
        begun.set()
        release.wait(WAIT)
        ended.set()
        raise BackendError("too late")

    def interrupt() -> Engine:
        begun.wait(WAIT)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timed({"a": [interrupt, hang]}, jobs=2)
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
    site = Site(wanted=2)
    random = np.random.default_rng(0)
    limits = {"most_seconds": seconds, "enough": -1.0}
    builds = FreshBuilds(clock="wall", random=random, exclusive=nullcontext, **limits)
    found = builds.all_at_once({"a": [site.build] * 2}, 24)
    assert [len(build.wall_ms) for build in found.samples["a"]] == [rounds, rounds]


def test_later_measurements_are_scaled_to_the_rounds_of_the_first() -> None:
    """The second measurement is slower by a factor of its own in each round; the ratios within it are kept."""

    def measured(slower: tuple[float, ...], a: float, b: float) -> Together:
        builds = {
            name: [Samples(wall_ms=tuple(level * each for each in slower))]
            for name, level in (("a", a), ("b", b))
        }
        return Together(builds)

    found = merged([measured((1, 2, 1), 1, 4), measured((3, 5, 7, 9), 2, 2)])
    assert found.measurements == 2
    times = {name: [build.wall_ms for build in builds] for name, builds in found.samples.items()}
    assert times["a"] == [(1, 2, 1), pytest.approx((2, 4, 2))]
    assert times["b"] == [(4, 8, 4), pytest.approx((2, 4, 2))]
    notes = {note for builds in found.samples.values() for build in builds for note in build.notes}
    assert notes == {"measured 2 times; later times are scaled to the first"}
