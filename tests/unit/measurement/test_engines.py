"""Several engines of one model at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from qdqspec.backends.open_engines import Engines
from qdqspec.errors import BackendError


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


def test_runs_go_on_at_the_same_time() -> None:
    """Each of two runs waits until the other has begun."""
    both = threading.Barrier(2, timeout=10)
    engines, built, log = opened(2, lambda _: both.wait() and None)
    with engines:
        assert are_doubled(engines, 4)
    assert len(built) == 2
    assert set(log) == set(built)


def test_after_a_failed_run_all_later_ones_fail() -> None:
    """They do not depend on which engine would have been free."""

    def run(value: float) -> None:
        if value == 2:
            raise BackendError("it crashed")

    engines, _, _ = opened(2, run)
    with engines:
        with pytest.raises(BackendError, match="it crashed"):
            are_doubled(engines, 6)
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
    with Engines(engines._build, 2, given=given) as several:
        assert are_doubled(several, 8)
        assert len(built) == 1  # of the engines that are not used here
        assert are_doubled(several, 20)
        assert set(log) == {given, built[-1]}
    assert (given.closed, built[-1].closed) == (False, True)
    engines.close()
