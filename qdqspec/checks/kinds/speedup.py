"""The check `speedup`: reference time over tuned time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from qdqspec._core.units import at_least_text, at_most_text, interval_text, ratio_text
from qdqspec.checks.base import CheckParams, untimed, verdict
from qdqspec.checks.kinds.latency import measured_section
from qdqspec.checks.rejected import candidates_section, faster_advice
from qdqspec.spec import Positive
from qdqspec.types import Evidence, EvidenceKind, LatencyEvidence, Outcome, Section, Verdict


class SpeedupParams(CheckParams):
    """The smallest speed-up."""

    kind: Literal["speedup"]
    min: Positive = Field(description="Reference time over tuned time: 1.3 means 30 % more inferences.")


class SpeedupCheck:
    """Compares reference and tuned model, both measured interleaved in one run, on one device."""

    Params: ClassVar[type[CheckParams]] = SpeedupParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})

    def judge(self, params: SpeedupParams, evidence: Evidence) -> Verdict:
        """Pass at or above the minimum, fail if the whole interval is below it; an unchanged model has the factor 1."""
        if evidence.status == "unchanged":
            return _unchanged(params, evidence)
        if evidence.latency is None:
            return untimed("latency", evidence)
        return _compare(params, evidence, evidence.latency)


def _compare(params: SpeedupParams, evidence: Evidence, latency: LatencyEvidence) -> Verdict:
    # Of prediction intervals, which are wider, a budget that is missed would more often be inconclusive.
    speedup = latency.tested_speedup
    value, bounds = ratio_text(speedup.median), interval_text(speedup)
    advice = faster_advice(evidence, "lower min", gap=params.min / speedup.median)
    outcome: Outcome
    if speedup.median >= params.min:
        least = speedup.low if latency.at_least is None else latency.at_least
        outcome, comparison = "pass", f"{value}x as fast, {at_least_text(least)}, asked"
    elif speedup.high < params.min:
        outcome, comparison = "fail", f"only {value}x as fast, {at_most_text(speedup.high)}, asked"
    else:
        outcome, comparison = (
            "inconclusive",
            f"{value}x as fast (95 % in this run: {bounds}): too noisy to tell from",
        )
        advice = "Measure again on a quieter machine: the interval contains the minimum. " + advice
    return verdict(
        outcome,
        f"{comparison} {ratio_text(params.min)}x",
        _budget(value, bounds, params, outcome),
        measured_section(latency, latency.clock),
        numbers={"speedup": speedup.median, "low": speedup.low, "high": speedup.high, "min": params.min},
        advice=advice,
    )


def _unchanged(params: SpeedupParams, evidence: Evidence) -> Verdict:
    outcome: Outcome = "pass" if params.min <= 1 else "fail"
    sections = [_budget("1.00", "the same model", params, outcome)]
    if evidence.latency is not None:
        sections.append(measured_section(evidence.latency, evidence.latency.clock))
    if evidence.search is not None and outcome == "fail":
        sections.append(candidates_section(evidence.search))
    return verdict(
        outcome,
        f"1.00x, unchanged: no faster placement was selected; asked {ratio_text(params.min)}x",
        *sections,
        numbers={"speedup": 1.0, "low": 1.0, "high": 1.0, "min": params.min},
        advice=faster_advice(evidence, "lower min", gap=params.min),
    )


def _budget(value: str, bounds: str, params: SpeedupParams, outcome: Outcome) -> Section:
    return Section(
        title="Budget",
        headers=("metric", "value", "95 % interval", "minimum", "verdict"),
        rows=(("reference over tuned", value, bounds, ratio_text(params.min), outcome),),
    )


check = SpeedupCheck()
