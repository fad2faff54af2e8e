"""Measures a cached winner again and decides whether it is still used. Part of the session.

One slow minute on a noisy machine must not start a search of many minutes, and none may start unasked in CI. So a
winner is given up only when two measurements prove it slower than the reference, each from fresh builds.
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
    """What one or two measurements say of a cached winner; ``latency`` is the last of them.

    ``faster``: one measurement proves it faster than the reference. ``slower``: both prove it slower. ``broken``: it
    cannot be built and run any more. ``inconclusive``: everything else.
    """

    outcome: Outcome
    latency: LatencyEvidence

    @property
    def finding(self) -> str:
        """The outcome in words, for a warning."""
        if self.outcome == "broken":
            return f"the cached winner could not be built and run again: {self.latency.failures['tuned']}"
        speedup = self.latency.speedup
        figures = f"{ratio_text(speedup.median)}x (95 %: {interval_text(speedup)})"
        if self.outcome == "slower":
            return f"the cached winner is slower than the reference in two measurements: {figures}"
        return f"inconclusive: the cached winner is neither proved faster nor proved slower: {figures}"


def recheck(measure: Measure) -> Recheck:
    """Measure a cached winner; where that proves no gain, once more with more builds and rounds."""
    first = measure(FIRST_BUILDS, FIRST_ROUNDS)
    if "tuned" not in first.samples:
        return Recheck(outcome="broken", latency=first)
    if first.speedup.low > 1:
        return Recheck(outcome="faster", latency=first)
    second = measure(SECOND_BUILDS, SECOND_ROUNDS)
    if "tuned" not in second.samples:
        return Recheck(outcome="broken", latency=second)
    if second.speedup.low > 1:
        return Recheck(outcome="faster", latency=second)
    slower = first.speedup.high < 1 and second.speedup.high < 1
    return Recheck(outcome="slower" if slower else "inconclusive", latency=second)
