"""Measures a cached winner again and decides whether it is still used.

A slow period of a noisy machine must not start a search that takes minutes, and in CI a search starts only on request.
So a winner is rejected only if two measurements from fresh builds prove that it gains less than ``tune.min_gain``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qdqspec.types import LatencyEvidence
from qdqspec.units import interval_text, ratio_text

FIRST_BUILDS, FIRST_ROUNDS = 2, 12
SECOND_BUILDS, SECOND_ROUNDS = 4, 48

Outcome = Literal["faster", "inconclusive", "slower", "broken"]
Measure = Callable[[int, int], LatencyEvidence]  # builds and rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The outcome of one or two measurements of a cached winner; ``latency`` is the last of them.

    ``faster``: one measurement proves that it gains more than ``min_gain``. ``slower``: both prove that it gains less.
    ``broken``: it cannot be built and run any more. ``inconclusive``: everything else.
    """

    outcome: Outcome
    latency: LatencyEvidence
    min_gain: float = 0.0

    @property
    def finding(self) -> str:
        """The outcome as text, for a warning."""
        if self.outcome == "broken":
            return f"the cached winner could not be built and run again: {self.latency.failures['tuned']}"
        speedup = self.latency.speedup
        figures = f"{ratio_text(speedup.median)}x (95 %: {interval_text(speedup)})"
        asked = f"the {100 * self.min_gain:g} % of tune.min_gain"
        if self.outcome == "slower":
            lost = "is slower than the reference" if speedup.high < 1 else f"gains less than {asked}"
            return f"the cached winner {lost} in two measurements: {figures}"
        by = f" by {asked}" if self.min_gain else ""
        return f"inconclusive: the cached winner is neither proved faster nor proved slower{by}: {figures}"


def recheck(measure: Measure, min_gain: float = 0.0) -> Recheck:
    """Measure a cached winner; if the gain is not proved, repeat once with more builds and rounds."""
    least = 1 / (1 - min_gain)
    below = []
    for builds, rounds in ((FIRST_BUILDS, FIRST_ROUNDS), (SECOND_BUILDS, SECOND_ROUNDS)):
        latency = measure(builds, rounds)
        if "tuned" not in latency.samples:
            return Recheck(outcome="broken", latency=latency)
        if latency.speedup.low > least:
            return Recheck(outcome="faster", latency=latency, min_gain=min_gain)
        below.append(latency.speedup.high < least)
    return Recheck(outcome="slower" if all(below) else "inconclusive", latency=latency, min_gain=min_gain)
