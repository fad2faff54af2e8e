"""The check `speedup`: reference time over tuned time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from qdqspec._core.units import at_least_text, at_most_text, interval_text, ratio_text
from qdqspec.checks.base import CheckParams, untimed, verdict
from qdqspec.checks.kinds.latency import measured_section
from qdqspec.checks.rejected import candidates_section, faster_advice
from qdqspec.spec import Positive
from qdqspec.types import Evidence, EvidenceKind, Interval, Outcome, Section, Verdict


class SpeedupCheck(CheckParams):
    """The smallest speed-up."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})
    kind: Literal["speedup"]
    min: Positive = Field(description="Reference time over tuned time: 1.3 means 30 % more inferences.")

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass at or above the minimum, fail if the whole interval is below it; an unchanged model has the factor 1."""
        latency, is_unchanged = evidence.latency, evidence.status == "unchanged"
        if latency is not None and not is_unchanged:
            # Of prediction intervals, which are wider, a budget that is missed would more often be inconclusive.
            speedup = latency.tested_speedup
        elif is_unchanged:
            speedup = Interval(median=1.0, low=1.0, high=1.0)
        else:
            return untimed("latency", evidence)
        value, asked = ratio_text(speedup.median), f"{ratio_text(self.min)}x"
        bounds = "the same model" if is_unchanged else interval_text(speedup)
        advice = faster_advice(evidence, "lower min", gap=self.min / speedup.median)
        outcome: Outcome = "pass" if speedup.median >= self.min else "fail"
        if is_unchanged:
            headline = f"{value}x, unchanged: no faster placement was selected; asked {asked}"
        elif outcome == "pass":
            least = latency.at_least if latency and latency.at_least is not None else speedup.low
            headline = f"{value}x as fast, {at_least_text(least)}, asked {asked}"
        elif speedup.high < self.min:
            headline = f"only {value}x as fast, {at_most_text(speedup.high)}, asked {asked}"
        else:
            outcome = "inconclusive"
            headline = f"{value}x as fast (95 % in this run: {bounds}): too noisy to tell from {asked}"
            advice = "Measure again on a quieter machine: the interval contains the minimum. " + advice
        search = evidence.search if is_unchanged and outcome == "fail" else None
        return verdict(
            outcome,
            headline,
            Section(
                title="Budget",
                headers=("metric", "value", "95 % interval", "minimum", "verdict"),
                rows=(("reference over tuned", value, bounds, ratio_text(self.min), outcome),),
            ),
            *([] if latency is None else [measured_section(latency, latency.clock)]),
            *([] if search is None else [candidates_section(search)]),
            numbers={"speedup": speedup.median, "low": speedup.low, "high": speedup.high, "min": self.min},
            advice=advice,
        )


check = SpeedupCheck
