"""The check `accuracy`: a task metric of the tuned model on labelled data."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from qdqspec._core.units import metric_text, percent_text, plain, share_text, texts_apart
from qdqspec.checks.base import CheckParams, LimitResult, require_a_limit, unmeasured, verdict_of_limits
from qdqspec.spec import MetricLimits
from qdqspec.types import SLACK, AccuracyEvidence, Evidence, EvidenceKind, Interval, Section, Verdict
from qdqspec.types.requests import Request, ScoreRequest


class AccuracyCheck(CheckParams, MetricLimits):
    """A task metric on labelled data, where higher is better."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"accuracy"})
    kind: Literal["accuracy"]

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "min", "max_drop")
        return self

    @property
    def request(self) -> ScoreRequest:
        """The metric that the check compares with its limits."""
        return ScoreRequest(metric=self.metric, output=self.output)

    def requests(self) -> tuple[Request, ...]:
        """The metric of reference and tuned model."""
        return (self.request,)

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if each given limit holds. The drop is reference minus tuned, in the metric's unit."""
        measured = evidence.accuracy.get(self.request.key)
        if measured is None or measured.samples == 0:
            return unmeasured(
                f"no {plain(self.request.key, 40)} was measured",
                "Give labelled data in inputs.evaluation: one array per input, and one with the labels.",
            )
        if self.min is not None and measured.reference < self.min - SLACK:
            own = metric_text(self.metric, measured.reference)
            advice = f"The reference itself has {own}: lower the minimum, or give a max_drop against it."
        else:
            is_held = evidence.search is not None and evidence.search.accuracy is not None
            first = "Exclude" if is_held else "Give the search the same limit (tune.accuracy), exclude"
            advice = (
                f"{first} the most sensitive nodes (patterns.nodes.exclude), try another quantize.calibration, or "
                "accept a lower limit."
            )
        return verdict_of_limits(
            _limits(self, measured),
            _measured(self, measured),
            numbers={
                "tuned": measured.tuned,
                "reference": measured.reference,
                "drop": measured.reference - measured.tuned,
                "samples": measured.samples,
            },
            advice=advice,
        )


def _limits(params: AccuracyCheck, measured: AccuracyEvidence) -> list[LimitResult]:
    name, text = plain(params.request.key, 24), partial(metric_text, params.metric)
    found: list[LimitResult] = []
    if params.min is not None:
        holds = measured.tuned >= params.min - SLACK
        value, least = texts_apart(text, measured.tuned, params.min, SLACK)
        sign = ">=" if holds else "<"
        found.append(LimitResult(f"{name} {value} {sign} {least}", holds, (name, value, f"at least {least}")))
    if params.max_drop is not None:
        drop = measured.reference - measured.tuned
        holds = drop <= params.max_drop + SLACK
        value, most = texts_apart(text, drop, params.max_drop, SLACK)
        moved = f"{text(measured.reference)} to {text(measured.tuned)}"
        words = (
            f"{f'{name} fell by {value}' if drop > 0 else f'{name} did not fall'} ({moved}), allowed {most}"
        )
        found.append(LimitResult(words, holds, ("drop", value, f"at most {most}")))
    return found


def drop_interval(lost: int, gained: int, samples: int) -> Interval:
    """The drop on the samples, with its 95 % confidence interval.

    For matched pairs, after Agresti and Min ("Simple improved confidence intervals for comparing matched
    proportions", Statistics in Medicine 24, 2005): Wald's interval with half a sample added to each kind.
    """
    count, down, up = samples + 2, lost + 0.5, gained + 0.5
    center = (down - up) / count
    reach = 1.96 * math.sqrt(down + up - (down - up) ** 2 / count) / count
    return Interval(median=(lost - gained) / samples, low=center - reach, high=center + reach)


def _measured(params: AccuracyCheck, measured: AccuracyEvidence) -> Section:
    facts = [
        ("metric", plain(params.request.key)),
        ("reference", metric_text(params.metric, measured.reference)),
        ("tuned", metric_text(params.metric, measured.tuned)),
    ]
    resolution = ""
    if measured.lost is not None and measured.gained is not None:
        drop = drop_interval(measured.lost, measured.gained, measured.samples)
        facts += [
            ("became wrong", str(measured.lost)),
            ("became right", str(measured.gained)),
            ("drop on similar data (95 %)", f"{percent_text(drop.low)} to {percent_text(drop.high)}"),
        ]
        step = 1 / measured.samples
        resolution = f"One sample of {measured.samples} is {100 * step:.2g} %"
        if params.max_drop is not None and params.max_drop < step - SLACK:
            resolution += f": within {share_text(params.max_drop)} no sample may be lost"
        resolution += "."
    return Section(
        title=f"Measured on {measured.samples} samples",
        headers=tuple(name for name, _ in facts),
        rows=(tuple(value for _, value in facts),),
        text=resolution,
    )


check = AccuracyCheck
