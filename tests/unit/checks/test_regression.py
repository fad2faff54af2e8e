"""The verdict of the regression check in every state of a baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from qdqspec.checks.kinds.regression import judge_change
from qdqspec.testing.records import check_named, faster_case, params_of, sample_regression
from qdqspec.types import Evidence, Interval, RegressionEvidence, TimeChange, Verdict

FASTER = faster_case().evidence
SAMPLE = sample_regression(0.0)["regression"]
NOTHING = replace(SAMPLE, baseline=None, ratio=None, change=None, notes=())


def judge(found: RegressionEvidence, evidence: Evidence = FASTER) -> Verdict:
    """The verdict on the entry of a check with an id, among others."""
    evidence = replace(evidence, regression={"regression": SAMPLE, "tight": found})
    return check_named("regression").judge(params_of("regression", id="tight"), evidence)


def change(
    low: float, high: float, *, ranks: tuple[float, float] | None = None, reference: float = 1.0
) -> TimeChange:
    rank_low, rank_high = ranks or (low, high)
    return TimeChange(
        builds=Interval(median=(low + high) / 2, low=low, high=high),
        ranks=Interval(median=(rank_low + rank_high) / 2, low=rank_low, high=rank_high),
        p_value=0.5,
        reference=reference,
    )


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (change(0.99, 1.05), "pass"),
        (change(0.99, 1.051), "inconclusive"),
        (change(1.051, 1.2), "fail"),
        (change(1.051, 1.2, ranks=(1.04, 1.3)), "inconclusive"),
        (change(1.08, 1.12, reference=1.25), "inconclusive"),  # the float model took a quarter more time too
        (change(1.3, 1.4, reference=1.25), "fail"),
        (change(0.99, 1.05, reference=1.25), "pass"),
    ],
)
def test_a_failure_needs_both_intervals_beyond_the_allowance(seen: TimeChange, outcome: str) -> None:
    assert judge_change(seen, 0.05) == outcome


BOUND = st.floats(0.2, 5)


@given(BOUND, BOUND, BOUND, BOUND, st.floats(0.001, 1), BOUND)
def test_a_change_that_fails_at_an_allowance_fails_at_every_smaller_one(a, b, c, d, allowed, reference):
    seen = change(min(a, b), max(a, b), ranks=(min(c, d), max(c, d)), reference=reference)
    if judge_change(seen, allowed) == "fail":
        assert judge_change(seen, allowed / 2) == "fail"
    if judge_change(seen, allowed) in ("pass", "stale"):
        assert judge_change(seen, allowed * 2) in ("pass", "stale")


STATES = {
    "missing": replace(NOTHING, state="missing"),
    "missing, required": replace(NOTHING, state="missing", required=True),
    "unlike": replace(
        SAMPLE, state="unlike", reason="model was a67e768a9bd5, is 9d781c2ea1c9", change=None, notes=()
    ),
    "unlike, of long values": replace(
        SAMPLE,
        state="unlike",
        reason="patterns.exclude was empty, is *conv_net.3*, *conv_net.5*, *conv_net.7*, *conv_net.9*",
        change=None,
        notes=(),
    ),
    "damaged": replace(
        NOTHING,
        state="damaged",
        file="__baselines__/net/amd-epyc-family-26-model-2-avx512-vnni-onnxruntime-1.32-t1.json",
        reason="entry default::regression was changed since it was written",
        command="restore it from version control, or write it anew with --qdq-update=changed",
        required=True,
    ),
    "off": replace(NOTHING, state="off", command=""),
    "written": replace(SAMPLE, state="written", baseline=None, change=None),
    "renewed": replace(SAMPLE, state="written", change=None),
    "same": SAMPLE,
    "stale": sample_regression(-0.12)["regression"],
    "slower": sample_regression(0.12, looks=2)["regression"],
    "undecided": sample_regression(0.055, looks=2)["regression"],
    "slower, in other conditions": replace(SAMPLE, change=change(1.08, 1.12, reference=1.25)),
    "unchanged, then and now": replace(
        SAMPLE,
        baseline=Interval(median=1, low=1, high=1),
        ratio=Interval(median=1, low=1, high=1),
        change=change(1, 1),
        notes=(),
    ),
}


def test_messages_of_each_state(golden) -> None:
    lines = []
    for name, found in STATES.items():
        verdict = judge(found)
        lines += [f"{name}: {verdict.outcome}: {verdict.headline}"]
        for section in verdict.sections:
            lines += [f"  {section.title}: {section.text}".rstrip(": ")]
            lines += [f"    {' | '.join(row)}" for row in (section.headers, *section.rows) if row]
        lines += [f"  {verdict.advice}"] if verdict.advice else []
    golden("checks/regression.txt", "\n".join(lines) + "\n")


def test_a_case_that_is_unchanged_now_is_not_reported_as_slower() -> None:
    slower = sample_regression(0.12, looks=2)["regression"]
    search = FASTER.search
    assert search is not None
    unchanged = replace(FASTER, search=replace(search, unchanged=True, reason="nothing kept 52 dB"))
    assert judge(slower, unchanged).advice.startswith("The float model is selected now (nothing kept 52 dB)")
