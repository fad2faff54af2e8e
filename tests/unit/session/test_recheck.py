"""Conditions to keep a cached winner: the intervals of one or two measurements, compared with ``tune.min_gain``."""

from __future__ import annotations

import pytest

from qdqspec.app.session.winner import FIRST_BUILDS, SECOND_BUILDS, Recheck, recheck
from qdqspec.types import Interval, LatencyEvidence, RatioTest, Samples


def rechecked(*bounds: tuple[float, float], min_gain: float = 0.02) -> tuple[Recheck, list[int]]:
    """The outcome for measurements with these intervals of the speed-up, and the builds of each."""
    taken: list[int] = []

    def measure(builds: int, rounds: int) -> LatencyEvidence:
        low, high = bounds[len(taken)]
        taken.append(builds)
        speedup = Interval(median=(low + high) / 2, low=low, high=high)
        samples = {role: Samples(wall_ms=(1.0,) * rounds) for role in ("reference", "tuned")}
        tested = {"tuned": RatioTest(mean=speedup.inverse, enclosing=speedup.inverse)}
        return LatencyEvidence(
            clock="wall", samples=samples, ratios={}, tested=tested, speedup=speedup, builds=builds
        )

    return recheck(measure, min_gain), taken


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ([(1.03, 1.1)], "faster"),
        ([(1.01, 1.1), (1.03, 1.1)], "faster"),
        ([(1.01, 1.1), (1.01, 1.05)], "inconclusive"),  # faster, but a gain of 2 % is not proved
        ([(1.0, 1.01), (1.0, 1.01)], "slower"),
        ([(0.9, 0.95), (0.9, 1.1)], "inconclusive"),
        ([(0.9, 0.95), (0.9, 0.95)], "slower"),
    ],
)
def test_a_cached_winner_must_prove_the_minimum_gain(bounds: list[tuple[float, float]], outcome: str) -> None:
    found, taken = rechecked(*bounds)
    assert found.outcome == outcome
    assert taken == [FIRST_BUILDS, SECOND_BUILDS][: len(bounds)]


def test_any_proved_gain_is_enough_without_a_minimum_gain() -> None:
    assert rechecked((1.001, 1.1), min_gain=0.0)[0].outcome == "faster"


def test_the_finding_states_the_gain_that_is_not_proved() -> None:
    assert "gains less than the 2 % of tune.min_gain in two" in rechecked((1.0, 1.01), (1.0, 1.01))[0].finding
    assert "is slower than the reference in two" in rechecked((0.9, 0.95), (0.9, 0.95))[0].finding
    assert "nor proved slower by the 2 % of tune.min_gain: " in rechecked((0.9, 1.1), (0.9, 1.1))[0].finding
