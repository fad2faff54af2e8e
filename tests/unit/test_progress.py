"""The end of a search, the texts of its progress, and texts of quantities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from qdqspec._core.progress import Deadline, Heartbeat, bar_texts, can_draw, heartbeat_line
from qdqspec._core.units import (
    at_least_text,
    at_most_text,
    count_text,
    db_text,
    ms_text,
    ms_texts_apart,
    origin_text,
    percent_text,
    plain,
    proved_text,
    seconds_text,
    size_text,
)
from qdqspec.types import Interval, LatencyEvidence, Progress, Provenance, RatioTest

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

WAIT = replace(STEP, waiting="waits for a measurement on cpu-family6-model167 (process 4242, since 10:02)")


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("progress", [STEP, SEARCH, WAIT, replace(SEARCH, doing="", seconds_left=None)])
def test_the_texts_of_a_progress_bar_are_within_its_width(progress: Progress, width: int) -> None:
    before, after = bar_texts(progress, width)
    assert len(before) + len(after) <= width
    assert (progress.waiting[:20] or progress.doing or progress.phase) in before
    assert "60" in after or not progress.total
    assert "4 min left" in after or progress.seconds_left is None


def test_the_text_of_a_step_contains_the_time_left_of_the_search() -> None:
    step = replace(STEP, seconds_left=42.0)
    assert bar_texts(step, 80)[1] == "42 s left"
    assert heartbeat_line(step) == f"[qdqspec] {STEP.case}: calibrating, 42 s left"


def test_a_bar_is_not_drawn_on_a_dumb_terminal() -> None:
    assert can_draw(is_terminal=True, environment={"TERM": "xterm-256color"})
    assert can_draw(is_terminal=True, environment={})
    assert not can_draw(is_terminal=True, environment={"TERM": "dumb"})
    assert not can_draw(is_terminal=False, environment={"TERM": "xterm"})


def test_a_log_has_the_first_step_of_a_case_and_a_line_a_minute() -> None:
    now, lines = [0.0], list[str]()
    heartbeat = Heartbeat(lines.append, clock=lambda: now[0])
    heartbeat.update(STEP)
    heartbeat.update(replace(STEP, doing="running the reference"))
    heartbeat.update(SEARCH)
    now[0] = 70.0
    heartbeat.update(SEARCH)
    heartbeat.update(replace(STEP, case="other"))
    assert lines == [
        "[qdqspec] specs/squeezenet.qdq.yaml::default: calibrating",
        (
            "[qdqspec] specs/squeezenet.qdq.yaml::default: timing candidate 12, trial 12 of 60, best 1.52x, 3 kept, "
            "8 dropped, 1 undecided, 4 min left"
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


@pytest.mark.parametrize(
    ("words", "now", "left", "reached"),
    [
        ({}, 1e9, None, ""),
        ({"seconds": 90.0}, 60.0, 30.0, ""),
        ({"seconds": 90.0}, 90.0, 0.0, "its limit of 1 min 30 s"),
        ({"seconds": 10.0, "run_left": lambda: 5.0}, 0.0, 5.0, ""),
        ({"seconds": 10.0, "run_left": lambda: 0.0}, 0.0, 0.0, "the time limit of the run"),
        ({"seconds": 40.0, "reserved": 10.0}, 0.0, 30.0, ""),
        ({"seconds": 40.0, "reserved": 100.0}, 0.0, 20.0, ""),  # at most half of it
    ],
)
def test_the_time_left_is_that_of_the_next_limit(words: dict, now: float, left: float, reached: str) -> None:
    clock = [0.0]
    deadline = Deadline(clock=lambda: clock[0], **words)
    clock[0] = now
    assert (deadline.left, deadline.reached) == (left, reached)


def test_time_spent_waiting_does_not_count() -> None:
    now = [0.0, 0.0]
    deadline = Deadline(seconds=10.0, clock=lambda: now[0], waited=lambda: now[1])
    now[:] = 12.0, 5.0
    assert (deadline.spent, deadline.left) == (7.0, 3.0)


def test_a_step_is_allowed_that_ends_before_a_multiple_of_the_limit() -> None:
    now = [0.0]
    endless, deadline = Deadline(), Deadline(seconds=90.0, clock=lambda: now[0])
    now[0] = 60.0
    assert (endless.allows(1e9), deadline.allows(31.0), deadline.allows(31.0, times=2)) == (True, False, True)


@given(st.floats(1e-4, 1e5), st.floats(-1e-3, 1e-3))
def test_texts_of_different_times_differ(value: float, change: float) -> None:
    other = value * (1 + change)
    shown, shown_other = ms_texts_apart(value, other)
    if abs(change) > 1e-5:
        assert shown != shown_other
        assert (float(shown) > float(shown_other)) == (value > other)


def test_a_time_far_from_its_limit_keeps_its_own_digits() -> None:
    assert ms_texts_apart(0.6, 100.0) == ("0.600", "100")
    assert ms_texts_apart(100.04, 100.0) == ("100.04", "100.00")


def test_the_texts_of_quantities() -> None:
    times = {1.314: "1.31", 26.53: "26.5", 312.4: "312", 0.00512: "0.0051", 0: "0.000"}
    assert {value: ms_text(value) for value in times} == times
    decibels = {31.44: "31.4", math.inf: "exact", math.nan: "not a number"}
    assert {value: db_text(value) for value in decibels} == decibels
    assert size_text(4_990_000) == "4.76 MiB"
    assert size_text(12) == "12 B"
    assert count_text(1, "pair") == "1 pair"
    assert count_text(0, "pair") == "0 pairs"
    texts = {4.21: "4.2 s", 42: "42 s", 185: "3 min 05 s", 7800: "2 h 10 min"}
    assert {seconds: seconds_text(seconds) for seconds in texts} == texts
    rough = {0.2: "0 s", 89: "89 s", 91: "2 min", 5399: "90 min", 7800: "2 h", 200_000: "2 d"}
    assert {seconds: seconds_text(seconds, rough=True) for seconds in rough} == rough
    assert origin_text(Provenance()) == "measured"
    assert origin_text(Provenance(source="cached", age_seconds=7200)) == "cached (2 h)"
    assert percent_text(0.0917) == "+9.2 %"


@given(st.text(), st.integers(8, 60))
def test_any_text_is_converted_to_one_printable_line(text: str, width: int) -> None:
    line = plain(text, width)
    assert len(line) <= width
    assert line.isprintable()
    if text.isprintable() and len(text) <= width:
        assert line == text


# ---- what is proved of a speed-up ---------------------------------------------------------------
def shown_factor(text: str) -> float:
    """The factor of ``at least 1.05x``."""
    return float(text.split()[-1].rstrip("x"))


@given(st.floats(1e-3, 1e3))
def test_bounds_are_not_overstated(bound: float) -> None:
    low, high = shown_factor(at_least_text(bound)), shown_factor(at_most_text(bound))
    assert low <= bound <= high
    assert high - low <= 0.0101


def test_bounds_are_not_rounded_to_one() -> None:
    assert (at_least_text(1.0034), at_most_text(1.0034)) == ("at least 1.003x", "at most 1.01x")
    assert (at_least_text(0.9968), at_most_text(0.9968)) == ("at least 0.99x", "at most 0.997x")


def latency_of(*ratio: float, slowest: float = 0.0, tested: bool = True) -> LatencyEvidence:
    """The evidence of a ratio: low, median and high of its mean; in one condition it extends to ``slowest``."""
    low, median, high = ratio
    mean = Interval(median=median, low=low, high=high)
    both = RatioTest(mean=mean, enclosing=Interval(median=median, low=low, high=max(high, slowest)))
    return LatencyEvidence(
        clock="cpu",
        samples={},
        ratios={"tuned": mean},
        speedup=mean.widened(2).inverse,
        builds=3,
        tested={"tuned": both} if tested else {},
    )


@pytest.mark.parametrize(
    ("latency", "text"),
    [
        (latency_of(0.84, 0.893, 0.95), ", at least 1.05x"),
        (latency_of(0.90, 0.95, 0.99), ", inconclusive"),  # faster, but 2 % are not proved
        (latency_of(0.84, 0.893, 0.95, slowest=1.02), ", inconclusive"),  # not in both conditions
        (latency_of(0.985, 0.99, 0.995), ", at most 1.02x"),  # it gains less than 2 %
        (latency_of(1.1, 1.2, 1.3), ", at most 0.91x"),
        (latency_of(0.5, 0.5, 0.5, tested=False), " (95 %: 2.00 to 2.00)"),
    ],
)
def test_the_proved_bound_of_a_speedup(latency: LatencyEvidence, text: str) -> None:
    assert proved_text(latency, 0.02) == text


FACTORS = st.floats(0.05, 20)


@given(st.lists(FACTORS, min_size=4, max_size=4), st.sampled_from([0.0, 0.02, 0.1, 0.3]))
def test_a_bound_is_shown_only_if_the_gain_asked_for_is_proved(factors: list[float], gain: float) -> None:
    low, median, high, slowest = sorted(factors)
    text = proved_text(latency_of(low, median, high, slowest=slowest), gain)
    if "at least" in text:
        assert slowest < 1
        assert 1 / high >= 1 / (1 - gain)
        assert 1 < shown_factor(text) <= 1 / high or high > 1 - 1e-6
    elif "at most" in text:
        assert low > 1 - gain
        assert shown_factor(text) >= 1 / low
    else:
        assert text == ", inconclusive"
