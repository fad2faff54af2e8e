"""The confirmation of a search: the selected model, and the second measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from lab import REFERENCE, known, placement

from qdqspec._core.progress import Deadline
from qdqspec._core.units import proved_text
from qdqspec.search.confirmation import MOST_TIMES, confirm
from qdqspec.search.limits import Limits
from qdqspec.types import Interval, LatencyEvidence, Placement, Race, RatioTest, Samples, SearchLimits, Trial

FAST, EVERYTHING = placement("fast"), placement("everything")


def ratio(low: float, median: float, high: float) -> Interval:
    return Interval(median=median, low=low, high=high)


SURE = {"reference": ratio(1, 1, 1), "everything": ratio(1.1, 1.2, 1.3)}


def ratio_tests_of(ratios: Mapping[str, Interval]) -> dict[str, RatioTest]:
    """Tests of ratios that are equal in both conditions."""
    return {role: RatioTest(mean=each, enclosing=each) for role, each in ratios.items()}


class Bench:
    """Returns the intervals of the winner in order, and records the roles of each measurement."""

    def __init__(self, *winner: Interval) -> None:
        self._winner = iter(winner)
        self.asked: list[set[str]] = []

    def compare(
        self,
        roles: Mapping[str, Placement],
        *,
        is_settled: Callable[[Any], bool],
        again: Callable[[Any], bool],
    ) -> LatencyEvidence:
        self.is_settled = is_settled
        while True:
            self.asked.append(set(roles))
            fast = next(self._winner)
            ratios = {role: fast if placement == FAST else SURE[role] for role, placement in roles.items()}
            if not again(ratio_tests_of(ratios)):
                break
        samples = {role: Samples(wall_ms=(interval.median,) * 3) for role, interval in ratios.items()}
        figures = {"samples": samples, "ratios": ratios, "tested": ratio_tests_of(ratios)}
        return LatencyEvidence(clock="wall", speedup=ratio(1, 1, 1), builds=3, **figures)


def confirmed(
    bench: Bench,
    min_gain: float = 0.02,
    more_trials: tuple[Trial, ...] = (),
    build_seconds: float = 0.0,
    **more: Any,
) -> Any:
    race = Race(opponent=REFERENCE.digest, ratio=0.9, p_value=0.01, pairs=12, verdict="faster")
    reference = known(REFERENCE, 1.0, build_seconds=build_seconds)
    trials = (reference, replace(known(FAST, 0.9, race=race), number=1), *more_trials)
    limits = more.pop("limits", Limits(asked=SearchLimits(min_gain=min_gain, min_sqnr_db=None)))
    more = {"deadline": Deadline(clock=lambda: 0.0), "wait": lambda _: None, **more}
    return confirm(trials, EVERYTHING, bench, limits, pareto=False, **more)  # type: ignore[arg-type] # only the used attributes


def after(share: float) -> Deadline:
    """A time limit of which this share is spent; a confirmation may take twice the limit if it is likely to decide."""
    clock = iter([0.0])
    return Deadline(seconds=100.0, clock=lambda: next(clock, 100 * share))


def test_full_quantization_is_not_confirmed_if_its_builds_take_too_long() -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    found = confirmed(bench, build_seconds=7.0, deadline=after(1.6))  # 6 builds would take 42 s
    assert bench.asked[0] == {"reference", "winner", "tuned"}
    assert "everything" not in found.latency.ratios
    built = Trial(number=2, phase="pure", placement=EVERYTHING, ratio=1.2)
    searched = Bench(ratio(0.85, 0.9, 0.95))
    confirmed(searched, more_trials=(built,), build_seconds=7.0, deadline=after(1.6))
    assert "everything" in searched.asked[0]  # built in the search already


@pytest.mark.parametrize(("spent", "is_timed"), [(0.5, True), (1.1, False)])
def test_full_quantization_that_misses_the_limits_is_timed_only_within_the_time(
    spent: float, *, is_timed: bool
) -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    missed = Trial(number=2, phase="pure", placement=EVERYTHING, ratio=1.2, sqnr_db=6.0)
    limits = Limits(asked=SearchLimits(min_gain=0.02, min_sqnr_db=20.0))
    for trial in (missed, replace(known(FAST, 0.9), sqnr_db=30.0)):
        limits.learn(trial)
    confirmed(bench, more_trials=(missed,), deadline=after(spent), limits=limits)
    assert ("everything" in bench.asked[0]) is is_timed


CLOSE, PROVED = ratio(0.85, 0.93, 1.01), ratio(0.9, 0.93, 0.96)


@pytest.mark.parametrize(
    ("measured", "selected"),
    [
        pytest.param([ratio(0.85, 0.9, 0.95)], FAST, id="proved"),
        pytest.param([ratio(0.96, 0.99, 1.02)], REFERENCE, id="unlikely"),
        pytest.param([CLOSE, PROVED], FAST, id="proved by the second"),
        pytest.param([CLOSE, ratio(0.9, 0.985, 1.02)], REFERENCE, id="not proved by the second"),
        pytest.param([CLOSE, CLOSE, CLOSE, ratio(0.89, 0.93, 0.975), PROVED], FAST, id="at other times"),
    ],
)
def test_an_undecided_measurement_is_repeated(measured: list[Interval], selected: Placement) -> None:
    """Of the last row, the fourth one is too close to the limit for a repeated test."""
    bench, waited = Bench(*measured), list[float]()
    found = confirmed(bench, wait=waited.append)
    assert found.choice.placement == selected
    assert len(bench.asked) == len(measured)
    assert waited == [4.0] * (len(measured) - 2)
    if selected == FAST:
        assert found.latency.ratios["tuned"] == measured[-1]
        assert found.latency.ratios["everything"] == SURE["everything"]


@pytest.mark.parametrize(
    ("tuned", "is_settled"),
    [
        (ratio(0.88, 0.9, 0.92), True),  # a gain
        (ratio(0.99, 1.0, 1.01), True),  # less than the smallest gain
        (ratio(0.95, 0.96, 0.975), False),  # proved now, and so close that it must be proved by all rounds
        (ratio(0.97, 0.98, 0.99), False),  # neither gain nor loss is proved
        (ratio(0.8, 0.85, 0.9), True),  # a gain of unknown size: more rounds would not tell it
    ],
)
def test_a_confirmation_ends_early_if_every_role_is_decided(tuned: Interval, is_settled: bool) -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    confirmed(bench)
    ratios = {"reference": SURE["reference"], "winner": tuned, "everything": ratio(1.19, 1.2, 1.21)}
    assert bench.is_settled(ratio_tests_of(ratios)) is is_settled
    assert not bench.is_settled(ratio_tests_of({"winner": tuned, "everything": ratio(0.9, 1.0, 1.1)}))
    slower_once = RatioTest(mean=ratio(0.88, 0.9, 0.92), enclosing=ratio(0.7, 0.9, 1.01))
    assert not bench.is_settled({"winner": slower_once})


@pytest.mark.parametrize(("spent", "measurements"), [(1.5, 2), (2.5, 1)])
def test_the_time_limit_ends_repetitions_then_the_second_measurement(spent: float, measurements: int) -> None:
    bench = Bench(ratio(0.85, 0.93, 1.01), ratio(0.89, 0.93, 0.975))
    assert confirmed(bench, deadline=after(spent)).choice.unchanged is (measurements == 1)
    assert len(bench.asked) == measurements


SIMULATED = st.tuples(st.floats(0.6, 1.2), st.floats(0.0, 0.2)).map(
    lambda each: ratio(each[0] * math.exp(-each[1]), each[0], each[0] * math.exp(each[1]))
)


@given(st.lists(SIMULATED, min_size=MOST_TIMES + 1, max_size=9), st.sampled_from([0.0, 0.02, 0.1]))
def test_a_selected_model_has_the_gain_asked_for(measured: list[Interval], min_gain: float) -> None:
    """Of one to five measurements, the one that decided is reported."""
    found = confirmed(Bench(*measured), min_gain)
    if found.choice.unchanged:
        assert found.latency.at_least == found.latency.speedup.median == 1
    else:
        assert found.latency.at_least >= 1 / (1 - min_gain)
        assert proved_text(found.latency, min_gain).startswith(", at least ")


# ---- candidates that are converted from the float type of the user's model ----------------------


@pytest.mark.parametrize(("plain", "unchanged"), [(0.95, False), (0.8, True), (0.7, True)])
def test_a_placement_must_be_faster_than_the_user_model_and_the_converted_one(
    monkeypatch: pytest.MonkeyPatch, plain: float, unchanged: bool
) -> None:
    monkeypatch.setitem(SURE, "float32", ratio(plain - 0.01, plain, plain + 0.01))
    bench = Bench(ratio(0.79, 0.8, 0.81))
    found = confirmed(bench, beside={"reference": Path("given.onnx")})
    (roles,) = bench.asked
    assert {"reference", "float32", "tuned"} <= roles
    assert found.choice.unchanged == unchanged
    assert found.latency.ratios["float32"].median == plain
    assert found.latency.speedup.median == pytest.approx(1 if unchanged else 1.25)
