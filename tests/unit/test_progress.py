"""The texts of the progress bar and of the progress log of a search."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

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
