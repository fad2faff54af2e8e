"""Pieces that several checks' verdicts share. May import floor 0."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qdqspec.types import Evidence, Outcome, Section, Verdict
from qdqspec.units import count_text, plain

WIDTH = 79  # a headline is a summary line of pytest and a heading of reports


def verdict(
    outcome: Outcome,
    headline: str,
    *sections: Section,
    numbers: Mapping[str, float] | None = None,
    advice: str = "",
) -> Verdict:
    """A verdict whose headline fits one line and whose numbers are finite; others are left out."""
    finite = {name: float(value) for name, value in (numbers or {}).items() if math.isfinite(value)}
    return Verdict(
        outcome=outcome,
        headline=plain(headline, WIDTH),
        sections=sections,
        numbers=finite,
        advice="" if outcome == "pass" else advice,
    )


def unmeasured(what: str, advice: str) -> Verdict:
    """The verdict where the evidence that a check needs is not there."""
    return verdict("inconclusive", f"{what}: nothing to judge", advice=advice)


def is_unchanged(evidence: Evidence) -> bool:
    """Whether the search selected the reference itself."""
    return evidence.search is not None and evidence.search.unchanged


def faster_advice(evidence: Evidence, otherwise: str) -> str:
    """What may make the model faster, given what the search did; ``otherwise`` ends the sentence."""
    search = evidence.search
    if search is None:
        return f"Tune the model again, or {otherwise}."
    tried = f"{count_text(search.built, 'candidate')} built, {search.failed} failed"
    if search.unchanged:
        return (
            f"The model is unchanged ({plain(search.reason)}; {tried}). "
            f"Allow more patterns, raise tune.trials, or {otherwise}."
        )
    return f"Allow more patterns, raise tune.trials ({tried}), or {otherwise}."
