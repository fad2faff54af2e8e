"""The end of a search, and the texts of its progress."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from qdqspec._core.deadline import Deadline
from qdqspec._core.progress import Heartbeat, ProgressBar, bar_texts, can_draw
from qdqspec.types import Progress

STEP = Progress(case="specs/squeezenet.qdq.yaml::default", phase="", done=0, total=0, doing="calibrating")
SEARCH = replace(
    STEP,
    phase="compose",
    done=12,
    total=60,
    best=0.66,
    kept=3,
    dropped=8,
    undecided=1,
    seconds_left=240,
    doing="timing candidate 12",
)


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("progress", [STEP, SEARCH, replace(SEARCH, doing="", seconds_left=None)])
def test_the_texts_of_a_progress_bar_are_within_its_width(progress: Progress, width: int) -> None:
    before, after = bar_texts(progress, width)
    assert len(before) + len(after) <= width
    assert (progress.doing or progress.phase) in before
    assert "60" in after or not progress.total
    assert "4 min left" in after or progress.seconds_left is None


def test_a_bar_is_not_drawn_on_a_dumb_terminal() -> None:
    assert can_draw(is_terminal=True, environment={"TERM": "xterm-256color"})
    assert can_draw(is_terminal=True, environment={})
    assert not can_draw(is_terminal=True, environment={"TERM": "dumb"})
    assert not can_draw(is_terminal=False, environment={"TERM": "xterm"})


def test_the_lines_about_waiting_are_within_the_width_and_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    what = "waits for a measurement on cpu-family6-model167 (process 4242, since 2026-11-22 10:02:11)"
    file = StringIO()
    bar = ProgressBar(file=file)
    for _ in range(3):
        bar.update(replace(STEP, waiting=what))
    assert all(len(line) <= 60 for line in file.getvalue().splitlines())
    assert file.getvalue().split() == ["[qdqspec]", f"{STEP.case}:", *what.split()]


def test_a_log_has_the_first_step_of_a_case_and_steps_after_an_interval() -> None:
    now, lines = [0.0], list[str]()
    heartbeat = Heartbeat(lines.append, clock=lambda: now[0])
    heartbeat.update(STEP)
    heartbeat.update(replace(STEP, doing="running the reference"))
    now[0] = 9.0
    heartbeat.update(replace(STEP, doing="looking for corrections"))
    heartbeat.update(SEARCH)
    now[0] = 70.0
    heartbeat.update(SEARCH)
    heartbeat.update(replace(STEP, case="other"))
    assert lines == [
        "[qdqspec] specs/squeezenet.qdq.yaml::default: calibrating",
        "[qdqspec] specs/squeezenet.qdq.yaml::default: looking for corrections",
        (
            "[qdqspec] specs/squeezenet.qdq.yaml::default: timing candidate 12, trial 12 of 60, best 1.52x, 3 kept, "
            "8 dropped, 1 no difference, 4 min left"
        ),
        "[qdqspec] other: calibrating",
    ]


def test_the_log_does_not_repeat_lines_of_concurrent_cases() -> None:
    """Updates of a cluster alternate between cases and repeat the unchanged state of each."""
    now, lines = [0.0], list[str]()
    heartbeat = Heartbeat(lines.append, clock=lambda: now[0])
    wait = replace(STEP, case="b", waiting="waits for a measurement")
    for _ in range(20):
        now[0] += 2.0
        heartbeat.update(replace(STEP, case="a"))
        heartbeat.update(wait)
    assert lines == ["[qdqspec] a: calibrating", "[qdqspec] b: waits for a measurement"]
    now[0] += 60.0
    heartbeat.update(wait)
    assert lines[2:] == ["[qdqspec] b: waits for a measurement"]


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
