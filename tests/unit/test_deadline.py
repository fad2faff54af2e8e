"""The end of a search: its own limit, that of the run, and what is kept back."""

from __future__ import annotations

import pytest

from qdqspec._core.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_ends() -> None:
    deadline = Deadline()
    assert deadline.left is None
    assert deadline.reached == ""
    assert deadline.allows(1e9)
    assert deadline.share(0.1, otherwise=7.0) == 7.0


def test_a_limit_is_reached_after_its_seconds() -> None:
    clock = Clock()
    deadline = Deadline(seconds=90.0, clock=clock)
    clock.now = 60.0
    assert (deadline.left, deadline.reached) == (30.0, "")
    assert (deadline.share(0.1, otherwise=7.0), deadline.share(0.5, otherwise=7.0)) == (9.0, 30.0)
    assert (deadline.allows(31.0), deadline.allows(31.0, times=2)) == (False, True)
    clock.now = 90.0
    assert (deadline.left, deadline.reached) == (0.0, "its limit of 1 min 30 s")


def test_time_spent_waiting_does_not_count() -> None:
    clock, waited = Clock(), Clock()
    deadline = Deadline(seconds=10.0, clock=clock, waited=waited)
    clock.now, waited.now = 12.0, 5.0
    assert (deadline.spent, deadline.left) == (7.0, 3.0)


@pytest.mark.parametrize(
    ("run_left", "left", "reached"), [(5.0, 5.0, ""), (0.0, 0.0, "the time limit of the run")]
)
def test_the_limit_of_the_run_counts_too(run_left: float, left: float, reached: str) -> None:
    deadline = Deadline(seconds=10.0, clock=lambda: 0.0, run_left=lambda: run_left)
    assert (deadline.left, deadline.reached) == (left, reached)


@pytest.mark.parametrize(("reserved", "left"), [(0.0, 40.0), (10.0, 30.0), (100.0, 20.0)])
def test_at_most_half_of_the_limit_is_reserved(reserved: float, left: float) -> None:
    deadline = Deadline(seconds=40.0, clock=lambda: 0.0)
    deadline.reserved = reserved
    assert deadline.left == left
