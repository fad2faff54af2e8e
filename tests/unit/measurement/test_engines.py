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
    """An engine that doubles its input and notes the threads that run it."""

    def __init__(self, log: list[tuple[Doubling, float]], run: Callable[[float], None]) -> None:
        self.log, self._run = log, run
        self.closed = False

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        value = float(feeds["x"])
        if self.closed:
            raise BackendError("the engine is closed")
        self.log.append((self, value))
        try:
            self._run(value)
        except BackendError:
            self.closed = True
            raise
        return {"y": 2 * value}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def runs_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Engines.__init__.__kwdefaults__, "worth_seconds", 0.0)


def opened(
    most: int, run: Callable[[float], None] = lambda _: None
) -> tuple[Engines, list[Doubling], list[tuple[Doubling, float]]]:
    built: list[Doubling] = []
    log: list[tuple[Doubling, float]] = []

    def build() -> Any:
        built.append(Doubling(log, run))
        return built[-1]

    return Engines(build, most), built, log


def feeds(count: int) -> Iterator[dict[str, Any]]:
    return ({"x": float(number)} for number in range(count))


def values(found: Iterator[Mapping[str, Any]]) -> list[float]:
    return [outputs["y"] for outputs in found]


@pytest.mark.parametrize(("most", "count"), [(1, 2), (3, 0), (3, 7), (8, 2)])
def test_outputs_are_in_the_order_of_the_inputs(most: int, count: int) -> None:
    waits = iter([0.02, 0.0, 0.01, 0.0, 0.02, 0.0, 0.0])
    engines, built, _ = opened(most, lambda _: time.sleep(next(waits)))
    with engines:
        assert values(engines.run_each(feeds(count))) == [2.0 * number for number in range(count)]
    assert len(built) <= min(most, max(count, 1))
    assert all(engine.closed for engine in built)


def test_runs_go_on_at_the_same_time() -> None:
    """Each of two runs waits until the other has begun."""
    both = threading.Barrier(2, timeout=10)
    engines, built, log = opened(2, lambda _: both.wait() and None)
    with engines:
        assert values(engines.run_each(feeds(4))) == [0.0, 2.0, 4.0, 6.0]
    assert len(built) == 2
    assert {engine for engine, _ in log} == set(built)


def test_after_a_failed_run_all_later_ones_fail() -> None:
    """They do not depend on which engine would have been free."""

    def run(value: float) -> None:
        if value == 2:
            raise BackendError("it crashed")

    engines, _, _ = opened(2, run)
    with engines:
        each = engines.run_each(feeds(6))
        assert [next(each)["y"], next(each)["y"]] == [0.0, 2.0]
        with pytest.raises(BackendError, match="it crashed"):
            next(each)
        for _ in range(4):
            with pytest.raises(BackendError, match="it crashed"):
                engines.run({"x": 0.0})
            with pytest.raises(BackendError, match="it crashed"):
                next(engines.run_each(feeds(2)))


def test_an_interrupt_ends_the_runs() -> None:
    """A run ends when its engine is closed, as the end of a process ends one."""
    begun, late = threading.Event(), list[float]()

    def run(value: float) -> None:
        begun.set()
        until = time.monotonic() + 10
        while not all(engine.closed for engine in built):
            if time.monotonic() > until:
                late.append(value)
                return
            time.sleep(0.01)

    def interrupted() -> Iterator[dict[str, Any]]:
        yield {"x": 1.0}
        begun.wait(10)
        raise KeyboardInterrupt

    engines, built, _ = opened(2, run)
    with engines, pytest.raises(KeyboardInterrupt):
        list(engines.run_each(interrupted()))
    assert begun.is_set()
    assert not late


def test_a_given_engine_has_others_beside_it_after_a_few_runs_and_stays_open() -> None:
    engines, built, log = opened(2)
    given = Doubling(log, lambda _: None)
    with Engines(engines._build, 2, given=given) as several:
        assert values(several.run_each(feeds(8))) == [2.0 * number for number in range(8)]
        assert len(built) == 1  # of the engines that are not used here
        assert values(several.run_each(feeds(20))) == [2.0 * number for number in range(20)]
        assert {engine for engine, _ in log} == {given, built[-1]}
    assert (given.closed, built[-1].closed) == (False, True)
    engines.close()
