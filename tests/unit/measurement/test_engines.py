"""Engines that are open at the same time, and the memory for them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest

from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import Engines, bytes_left, has_memory, is_memory_error
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model
from qdqspec.timing.race import AllProfiles


class Doubling:
    """An engine that doubles its input, and notes itself in the log of a run."""

    def __init__(self, log: list[Doubling], run: Callable[[float], None]) -> None:
        self.log, self._run = log, run
        self.closed = False

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        if self.closed:
            raise BackendError("the engine is closed")
        self.log.append(self)
        try:
            self._run(feeds["x"])
        except BackendError:
            self.closed = True
            raise
        return {"y": 2 * feeds["x"]}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def runs_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Engines.__init__.__kwdefaults__, "worth_seconds", 0.0)


def opened(
    most: int, run: Callable[[float], None] = lambda _: None
) -> tuple[Engines, list[Doubling], list[Doubling]]:
    """Engines, those that were built, and those that ran."""
    built, log = list[Doubling](), list[Doubling]()

    def build() -> Any:
        built.append(Doubling(log, run))
        return built[-1]

    return Engines(build, most), built, log


def are_doubled(engines: Engines, count: int) -> bool:
    """Whether the outputs are in the order of the inputs."""
    found = engines.run_each({"x": float(number)} for number in range(count))
    return [outputs["y"] for outputs in found] == [2.0 * number for number in range(count)]


@pytest.mark.parametrize(("most", "count"), [(1, 2), (3, 0), (3, 7), (8, 2)])
def test_outputs_are_in_the_order_of_the_inputs(most: int, count: int) -> None:
    waits = iter([0.02, 0.0, 0.01, 0.0, 0.02, 0.0, 0.0])
    engines, built, _ = opened(most, lambda _: time.sleep(next(waits)))
    with engines:
        assert are_doubled(engines, count)
    assert len(built) <= min(most, max(count, 1))
    assert all(engine.closed for engine in built)


def test_runs_go_on_at_the_same_time_and_after_a_failed_one_all_later_ones_fail() -> None:
    """Each of two runs waits until the other has begun. Failures do not depend on which engine would have been free."""
    both = threading.Barrier(2, timeout=10)

    def run(value: float) -> None:
        both.wait()
        if value == 6:
            raise BackendError("it crashed")

    engines, built, log = opened(2, run)
    with engines:
        assert are_doubled(engines, 4)
        assert len(built) == 2
        assert set(log) == set(built)
        with pytest.raises(BackendError, match="it crashed"):
            are_doubled(engines, 8)
        for _ in range(4):
            with pytest.raises(BackendError, match="it crashed"):
                engines.run({"x": 0.0})


def test_an_interrupt_ends_the_runs() -> None:
    """A run ends when its engine is closed, as the end of a process ends one."""
    begun, closed = threading.Event(), list[bool]()

    def run(_: float) -> None:
        begun.set()
        until = time.monotonic() + 10
        while not (is_closed := all(engine.closed for engine in built)) and time.monotonic() < until:
            time.sleep(0.01)
        closed.append(is_closed)

    def interrupted() -> Iterator[dict[str, Any]]:
        yield {"x": 1.0}
        begun.wait(10)
        raise KeyboardInterrupt

    engines, built, _ = opened(2, run)
    with engines, pytest.raises(KeyboardInterrupt):
        list(engines.run_each(interrupted()))
    assert begun.is_set()
    assert all(closed)


def test_a_given_engine_has_others_beside_it_after_a_few_runs_and_stays_open() -> None:
    engines, built, log = opened(2)
    given = Doubling(log, lambda _: None)
    with engines, Engines(engines._build, 2, given=given) as several:
        assert are_doubled(several, 8)
        assert len(built) == 1  # of the engines that are not used here
        assert are_doubled(several, 20)
        assert set(log) == {given, built[-1]}
    assert (given.closed, built[-1].closed) == (False, True)


# ---- memory limits that the system reports, and whether more engines fit into the free memory ---------


MEBI = 2**20


@dataclass
class OnGpu:
    """An engine on a GPU that reports its memory and the free memory, or fails."""

    holds: int
    free: int

    def device_memory(self) -> tuple[int, int]:
        if self.free < 0:
            raise BackendError("the engine is closed")
        return self.holds * MEBI, self.free * MEBI


def process(pid: int) -> SimpleNamespace:
    """An engine in a process of its own."""
    return SimpleNamespace(pid=pid)


@dataclass
class Machine:
    """The files in which Linux reports memory."""

    proc: Path
    groups: Path

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def engine(self, pid: int, *, holds: int, peak: int) -> SimpleNamespace:
        self.write(
            f"proc/{pid}/status",
            f"Name:\tpython 3\nVmHWM:\t {peak * 1024} kB\nVmRSS:\t 9 kB\nRssAnon:\t {holds * 1024} kB\n",
        )
        return process(pid)

    def left(self) -> float | None:
        left = bytes_left(self.proc, self.groups)
        return None if left is None else left / MEBI

    def fits(self, more: int, *engines: object) -> bool:
        return has_memory(cast("tuple[Engine, ...]", engines), more, proc=self.proc, groups=self.groups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path / "proc", tmp_path / "groups")
    found.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {8000 * 1024} kB\nHugePages_Free: 0\n")
    return found


@pytest.mark.parametrize("folder", ["", "user/", "user/job/"], ids=["of all", "around", "own"])
def test_the_lowest_limit_of_all_groups_applies(machine: Machine, folder: str) -> None:
    assert machine.left() == 8000
    machine.write("proc/self/cgroup", "0::/user/job\n")
    machine.write(f"groups/{folder}memory.max", "max\n")
    machine.write(f"groups/{folder}memory.current", f"{4000 * MEBI}\n")
    assert machine.left() == 8000
    machine.write(f"groups/{folder}memory.max", f"{5000 * MEBI}\n")
    assert machine.left() == 1000
    machine.write(f"groups/{folder}memory.stat", f"anon 5\nfile 7\ninactive_file {300 * MEBI}\n")
    assert machine.left() == 1300


def test_the_given_number_of_engines_of_the_largest_size_must_fit(machine: Machine) -> None:
    """Each engine needs its memory after the build, and one at a time that of the build. A tenth stays free."""
    small = machine.engine(7, holds=100, peak=100)
    large = machine.engine(8, holds=1000, peak=2200)
    assert machine.fits(72, small)
    assert not machine.fits(73, small)
    assert machine.fits(6, small, large)
    assert not machine.fits(7, small, large)
    # engines of unknown size fit
    assert machine.fits(1000)
    assert machine.fits(100, OnGpu(1000, -1))
    assert machine.fits(1000, process(0), process(12345))
    assert has_memory([], 1000)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports memory of processes")
def test_an_isolated_engine_reports_its_memory(tmp_path: Path) -> None:
    model = small_model()
    onnx.save(model, tmp_path / "model.onnx")
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    with Isolated("onnxruntime") as backend:
        engine = backend.build(tmp_path / "model.onnx", BuildOptions())
        engine.bind({"x": np.zeros(shape, np.float32)})
        for seen in (engine, AllProfiles(engine, (1.0,))):
            assert has_memory([seen], 1)
            assert not has_memory([seen], 10**6)


@pytest.mark.parametrize(
    ("words", "yes"),
    [
        ("killed by SIGKILL (often: the machine ran out of memory) during 'build'", True),
        ("CUDA failure 2: out of memory", True),
        ("std::bad_alloc", True),
        ("no implementation for node conv1 due to insufficient memory on requested size of 4096", True),
        ("Non-zero status code returned while running MatMul node /decoder/memory/MatMul", False),
        ("the engine's process was killed by SIGSEGV during 'run'", False),
    ],
)
def test_messages_of_runtimes_on_exhausted_memory_are_recognized(words: str, yes: bool) -> None:
    assert is_memory_error(BackendError(words)) is yes


@pytest.mark.parametrize(
    ("holds", "free", "more", "fits"), [(100, 1000, 8, True), (100, 1000, 10, False), (600, 500, 0, True)]
)
def test_engines_must_fit_into_the_free_memory_of_the_gpu(
    machine: Machine, holds: int, free: int, more: int, fits: bool
) -> None:
    assert machine.fits(more, OnGpu(10, free + 50), OnGpu(holds, free)) is fits
