"""The check `regression`: the ratio tuned / reference against the committed baseline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from qdqspec._core.units import percent_text, plain, share_text
from qdqspec.checks.base import WIDTH, CheckParams, untimed, verdict
from qdqspec.spec import Fraction
from qdqspec.types import (
    Evidence,
    EvidenceKind,
    Interval,
    Outcome,
    RegressionEvidence,
    Section,
    TimeChange,
    Verdict,
)
from qdqspec.types.requests import BaselineRequest, Request

Judgement: TypeAlias = Literal["pass", "stale", "inconclusive", "fail"]

ENTRY = "regression"  # the baseline entry of checks without an id
_LONG = 30  # characters of a file's name
_REASON_WIDTH = WIDTH - len("the baseline is not comparable: ")


class RegressionCheck(CheckParams):
    """The largest slowdown of a model against its baseline."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"regression"})
    kind: Literal["regression"]
    max: Annotated[Fraction, Field(gt=0, lt=1)] = Field(
        0.05,
        description="Largest growth of the ratio tuned / reference over the baseline's: 5% or 0.05.",
    )

    @property
    def evidence_key(self) -> str:
        """The entry of ``Evidence.regression``, and of the baseline file."""
        return self.id or ENTRY

    def requests(self) -> tuple[Request, ...]:
        """The comparison with the entry of the check."""
        return (BaselineRequest(key=self.evidence_key, allowed=self.max),)

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if the interval excludes growth beyond the allowance, fail if it is significant, else inconclusive."""
        found = evidence.regression.get(self.evidence_key)
        if found is None:
            return untimed("ratio", evidence)
        if found.state == "written":
            new = _ratio_text(found.ratio.median) if found.ratio else "unknown"
            headline = f"baseline written: tuned / reference {new}"
            if found.baseline is not None and found.ratio is not None:
                old = found.baseline.median
                moved = f"{_ratio_text(old)} to {new} ({percent_text(found.ratio.median / old - 1)})"
                headline = f"baseline renewed: tuned / reference {moved}"
            return verdict("pass", headline, numbers={"ratio": found.ratio.median} if found.ratio else {})
        change, baseline, ratio = found.change, found.baseline, found.ratio
        if change is None or baseline is None or ratio is None:
            return _judge_without_baseline(found, evidence)
        judged = judge_change(change, self.max)
        outcome: Outcome = "pass" if judged == "stale" else judged
        headline, advice = _conclude(self.max, evidence, found, change, judged)
        ranks = change.ranks
        growth = (
            percent_text(change.builds.median - 1),
            _bounds_text(change.builds),
            _bounds_text(ranks) if ranks.low > 0 and ranks.high < float("inf") else "too few rounds",
            f"at most {percent_text(self.max)}",
            outcome,
        )
        taken = "measured twice, the second time more precisely" if found.looks > 1 else "measured once"
        stale = f"Renew it: {found.command}" if judged == "stale" else ""
        return verdict(
            outcome,
            headline,
            Section(
                title="Budget",
                headers=("change", "95 % interval over builds", "99 % by rank test", "allowed", "verdict"),
                rows=(growth,),
            ),
            Section(
                title=f"Tuned over reference ({found.builds} builds each, interleaved, {taken})",
                headers=("run", "ratio", "95 % interval", "recorded"),
                rows=(
                    (
                        "baseline",
                        _ratio_text(baseline.median),
                        _ratio_bounds(baseline),
                        plain(found.recorded),
                    ),
                    ("this run", _ratio_text(ratio.median), _ratio_bounds(ratio), "now"),
                ),
            ),
            Section(title="Also different", text="\n".join(map(plain, found.notes))),
            Section(title="Stale baseline", text=stale),
            numbers={
                "ratio": ratio.median,
                "baseline": baseline.median,
                "change": change.builds.median - 1,
                "low": change.builds.low - 1,
                "high": change.builds.high - 1,
                "max": self.max,
                "p_value": change.p_value,
                "reference": change.reference - 1,
                "looks": float(found.looks),
            },
            advice=advice,
        )


def judge_change(change: TimeChange, allowed: float) -> Judgement:
    """Fail if the intervals over builds and by ranks both exclude the allowance and the effect of other conditions.

    A change is stale if the model became faster by more than that: it passes, but the baseline would hide a later loss.
    """
    bound = (1 + allowed) * conditions_effect(change)
    if change.builds.high <= 1 + allowed:
        is_stale = change.builds.high < 1 / bound and change.ranks.high < 1 / bound
        return "stale" if is_stale else "pass"
    return "fail" if change.builds.low > bound and change.ranks.low > bound else "inconclusive"


def conditions_effect(change: TimeChange, *, usual_drift: float = 0.05, share: float = 0.5) -> float:
    """The factor by which a ratio may change since the reference ran in other conditions; 1 if it did not.

    Other work on the machine slows the faster model more: where it made a float network 22 to 50 % slower, the ratio
    of the tuned one grew by up to a third of that (docs/how-to/baselines.md). A change of the reference's time by
    ``usual_drift`` has no effect on ratios, and a larger one changes them by ``share`` of the rest: larger numbers
    decide less often, and smaller ones fail models for the conditions.
    """
    drift = max(change.reference, 1 / change.reference) - 1
    return 1 + share * max(0.0, drift - usual_drift)


def _conclude(
    allowance: float, evidence: Evidence, found: RegressionEvidence, change: TimeChange, judged: Judgement
) -> tuple[str, str]:
    """Headline and advice for a change."""
    share, allowed = share_text(abs(change.builds.median - 1)), f"allowed {share_text(allowance)}"
    is_equal, bounds = share == share_text(0), f"95 %: {_bounds_text(change.builds)}"
    moved = "as fast" if is_equal else f"{share} {'faster' if change.builds.median < 1 else 'slower'}"
    against = f"{moved} {'as' if is_equal else 'than'} the baseline ({bounds})"
    if judged == "stale":
        return f"{against}: it is stale", ""
    if judged == "inconclusive" and conditions_effect(change) > 1:
        other = f"reference time {percent_text(change.reference - 1)} too: other conditions"
        return f"{moved}, but {other}", (
            "Measure again without other work on the machine: conditions that change the time of the float "
            "model this much change that of the faster model more."
        )
    if judged == "inconclusive":
        advice = "Measure again on a quieter machine, or raise the allowance: the interval contains it."
        return f"{moved} ({bounds}): too noisy to tell from the {allowed}", advice
    advice = f"Find the cause of the slowdown; if it is intended, renew the baseline and commit it: {found.command}"
    if evidence.status == "unchanged":
        advice = (
            f"The float model is selected now ({plain(evidence.reason)}). If this is intended, renew the baseline and "
            f"commit it: {found.command}"
        )
    return f"{against}, {allowed}", advice


def _bounds_text(change: Interval) -> str:
    return f"{percent_text(change.low - 1)} to {percent_text(change.high - 1)}"


def _ratio_text(value: float) -> str:
    return f"{value:.3f}"


def _ratio_bounds(interval: Interval) -> str:
    if interval.low == interval.high:
        return "the same model"
    return f"{_ratio_text(interval.low)} to {_ratio_text(interval.high)}"


def _judge_without_baseline(found: RegressionEvidence, evidence: Evidence) -> Verdict:
    """The verdict without a baseline, or with one that is not comparable."""
    file = plain(found.file.rpartition("/")[2])  # named after the device: a long one is in the table only
    # As much of the reason as the headline has room for: at least the rule that differs.
    rule, is_rule, values = found.reason.partition(" was ")
    _, _, nodes = values.partition(": ")  # of the model: the nodes that changed
    shorter = [f"{rule}: {text}" for text in (nodes, nodes.partition(":")[0]) if text]
    reasons = (found.reason, *shorter, f"{rule} differs" if is_rule else found.reason)
    reason = next((text for text in reasons if len(text) < _REASON_WIDTH), reasons[-1])
    comparison = {
        "missing": "no baseline of this check on this device",
        "unlike": f"the baseline is not comparable: {plain(reason)}",
        "damaged": f"damaged baseline{f' {file}' if len(file) < _LONG else ''}: {plain(found.reason)}",
        "off": "baselines are off in this run",
    }.get(found.state, found.reason)
    advice = f"Measure on this device and commit the file: {found.command}"
    if found.state == "missing" and found.required:
        advice += "\nWhere runners have several processors, --qdq-baseline=warn skips the check on those without one."
    if found.state == "damaged":
        advice = f"{found.command[:1].upper()}{found.command[1:]}."
    if found.state == "off":
        advice = "Run without --qdq-baseline=off."
    rows = (
        ("device", plain(evidence.device.key)),
        ("file", plain(found.file)),
        ("why", plain(found.reason)),
        ("its ratio", _ratio_text(found.baseline.median) if found.baseline else ""),
        ("ratio of this run", _ratio_text(found.ratio.median) if found.ratio else ""),
    )
    return verdict(
        "fail" if found.required else "inconclusive",
        comparison,
        Section(title="Baseline", headers=("what", "value"), rows=tuple(row for row in rows if row[1])),
        advice=advice,
        command="" if found.state == "damaged" else found.command,
    )


check = RegressionCheck
