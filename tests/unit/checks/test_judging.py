"""The verdict of each check on given evidence: outcome, headline, numbers and advice."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_evidence import sample_culprits, sample_lint, sample_parity_search

from qdqspec.checks.kinds.accuracy import drop_interval
from qdqspec.checks.kinds.latency import percentile
from qdqspec.checks.kinds.speedup import judge_interval
from qdqspec.checks.verdicts import faster_advice
from qdqspec.testing.records import alone_case, cached_case, check_named, faster_case, params_of
from qdqspec.types import (
    AccuracyEvidence,
    DeviceKey,
    Evidence,
    Interval,
    ParityEvidence,
    ParitySearch,
    PatternRules,
    ProfileLatency,
    RatioTest,
    Samples,
    TensorParity,
    Verdict,
    WorstSlice,
)

FASTER = faster_case().evidence
ALONE = alone_case().evidence
DIGITS = cached_case().evidence


def judge(kind: str, evidence: Evidence, **values: object) -> Verdict:
    return check_named(kind).judge(params_of(kind, **values), evidence)


def timed(*wall: float, cpu: tuple[float, ...] = ()) -> Evidence:
    assert FASTER.latency is not None
    samples = {"reference": Samples(wall_ms=(2.0,)), "tuned": Samples(wall_ms=wall, cpu_ms=cpu)}
    ratio = median(wall) / 2.0
    ratios = {
        "reference": Interval(median=1, low=1, high=1),
        "tuned": Interval(median=ratio, low=0.9 * ratio, high=1.1 * ratio),
    }
    return replace(FASTER, latency=replace(FASTER.latency, samples=samples, ratios=ratios, clock="wall"))


def with_outputs(*outputs: TensorParity) -> Evidence:
    return replace(FASTER, parity=ParityEvidence(outputs=outputs, samples=4, data="evaluation"))


def output(name: str, sqnr_db: float = 40.0, **values: object) -> TensorParity:
    facts: dict = {"cosine": 0.9999, "max_abs": 0.01, "max_steps": 1.0, **values}
    return TensorParity(name=name, sqnr_db=sqnr_db, **facts)


# ---- latency ------------------------------------------------------------------------------------


def test_each_shape_profile_may_have_a_separate_budget() -> None:
    parts = (Samples(wall_ms=(1.0, 1.2)), Samples(wall_ms=(9.0, 9.4)))
    evidence = timed(3.0, 3.2)
    assert evidence.latency is not None
    whole = replace(evidence.latency.samples["tuned"], profiles=parts)
    profiles = tuple(ProfileLatency(name=name, share=0.5, ratios={}) for name in ("x 1", "x 8"))
    latency = replace(evidence.latency, samples={"tuned": whole}, profiles=profiles)
    evidence = replace(evidence, latency=latency)
    assert judge("latency", evidence, max_ms=5).headline == "median 3.10 ms <= budget 5.00 ms (-38.0 %)"
    assert judge("latency", evidence, max_ms=5, profile=0).outcome == "pass"
    verdict = judge("latency", evidence, max_ms=5, profile=1)
    assert verdict.headline == "median at x 8 9.20 ms > budget 5.00 ms (+84.0 %)"
    assert ("tuned at x 8 (50%)", "9.20") in {row[:2] for row in verdict.sections[1].rows}
    missing = judge("latency", evidence, max_ms=5, profile=2)
    assert missing.outcome == "inconclusive"
    assert missing.headline == "shape profile 2 was not among the 2 measured: nothing to judge"
    assert judge("latency", timed(3.0), max_ms=5, profile=0).outcome == "pass", (
        "a single shape profile is the first"
    )


def test_the_budget_is_compared_with_milliseconds_that_agree_with_the_ratio() -> None:
    """The CPU speed differed between the runs of tuned model and reference: the median of the tuned runs alone is
    3.64."""
    evidence = timed(3.64, 3.64, 3.64)
    assert evidence.latency is not None
    ratios = {"tuned": Interval(median=0.97, low=0.96, high=0.98)}
    samples = {**evidence.latency.samples, "reference": Samples(wall_ms=(3.95, 3.95))}
    evidence = replace(evidence, latency=replace(evidence.latency, ratios=ratios, samples=samples))
    verdict = judge("latency", evidence, max_ms=3.7)
    assert verdict.headline == "median 3.83 ms > budget 3.70 ms (+3.6 %)"
    assert ("tuned", "3.83", "0.97") in {row[:3] for row in verdict.sections[1].rows}


SLOW_TAIL = timed(*([1.0] * 90), *([5.0] * 10))


@pytest.mark.parametrize(
    ("evidence", "values", "outcome", "headline"),
    [
        (timed(1.2, 1.2), {"max_ms": 1.2}, "pass", "median 1.20 ms <= budget 1.20 ms (+0.0 %)"),
        (timed(1.2001), {"max_ms": 1.2}, "fail", "median 1.2001 ms > budget 1.2000 ms (+0.0 %)"),
        (timed(4.5), {"max_ms": 0.001}, "fail", "median 4.50 ms > budget 0.0010 ms (4500x)"),
        (timed(3.0, cpu=(1.0,)), {"max_ms": 2}, "fail", "median 3.00 ms > budget 2.00 ms (+50.0 %)"),
        (timed(3.0, cpu=(1.0,)), {"max_ms": 2, "clock": "cpu"}, "pass", None),
        (timed(1.0), {"max_ms": 2, "clock": "cpu"}, "inconclusive", None),
        (SLOW_TAIL, {"max_ms": {"p50": 2, "p95": 6}}, "pass", "p95 5.00 ms <= budget 6.00 ms (-16.7 %)"),
        (SLOW_TAIL, {"max_ms": {"p50": 2, "p95": 4}}, "fail", "p95 5.00 ms > budget 4.00 ms (+25.0 %)"),
    ],
)
def test_a_time_is_compared_with_its_budget(
    evidence: Evidence, values: dict, outcome: str, headline: str | None
) -> None:
    verdict = judge("latency", evidence, **values)
    assert verdict.outcome == outcome
    assert headline in (None, verdict.headline)


def test_the_most_specific_budget_applies_that_of_the_device_first() -> None:
    table = {"onnxruntime": 0.5, "onnxruntime-cpu": 2, "any": 0.1}
    of_devices = {**table, "*avx512*": 0.7, "*avx512*onnxruntime-1*": 3}
    here = timed(1.0)
    elsewhere = replace(here, device=DeviceKey(key="arm64 neon"))
    for evidence, budgets, applied in (
        (here, table, 2),
        (replace(here, target="tensorrt"), table, 0.1),
        (here, of_devices, 3),  # the longest glob
        (elsewhere, of_devices, 2),
        (here, {**of_devices, here.device.key: 4}, 4),
    ):
        assert judge("latency", evidence, max_ms=budgets).numbers["budget_ms"] == applied


def test_a_percentile_that_a_single_run_decides_is_inconclusive() -> None:
    """The 99th percentile of twenty runs is nearly that of the slowest run."""
    verdict = judge("latency", timed(*([1.0] * 19), 9.0), max_ms=2, percentile=99)
    assert verdict.outcome == "inconclusive"
    assert verdict.headline == "p99 7.48 ms of 20 runs: too few to judge against budget 2.00 ms"
    assert "at least 100 runs" in verdict.advice
    for times, outcome in (
        ([1.0] * 99 + [9.0], "pass"),
        ([1.0] * 18 + [9.0] * 2, "fail"),
        ([1.0] * 20, "pass"),
        ([3.0] * 20, "fail"),
    ):
        assert judge("latency", timed(*times), max_ms=2, percentile=99).outcome == outcome


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=150),
    st.floats(0, 100),
    st.floats(0.01, 100),
    st.floats(1, 3),
)
def test_a_larger_budget_never_gives_a_worse_outcome(
    values: list[float], percent: float, budget: float, more: float
) -> None:
    order = ["fail", "inconclusive", "pass"]
    tight, loose = (
        judge("latency", timed(*values), max_ms=ms, percentile=percent).outcome
        for ms in (budget, budget * more)
    )
    assert order.index(loose) >= order.index(tight)
    if percent <= 50:
        assert "inconclusive" not in (tight, loose)


@given(st.lists(st.floats(0.01, 100), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_its_neighbours(values: list[float], percent: float) -> None:
    found = percentile(tuple(values), percent)
    assert min(values) <= found <= max(values)
    assert percentile((1.0, 2.0, 3.0), 50) == 2.0
    assert percentile((1.0, 2.0), 75) == 1.75


def test_advice_names_the_limit_that_ended_the_search():
    """A search that was complete tries no more candidates with a higher limit."""

    def advice(ended_by: str, **patterns: tuple[str, ...]) -> str:
        assert FASTER.search is not None
        case = replace(FASTER.case, patterns=PatternRules(**patterns))
        ended = replace(FASTER, case=case, search=replace(FASTER.search, ended_by=ended_by))
        return judge("speedup", ended, min=1.9).advice

    assert "tune.minutes" in advice("its limit of 5 min 00 s")
    assert "--qdq-time-limit" in advice("the time limit of the run")
    assert advice("") == "Use another number format, or lower min."
    assert advice("", deny=("Softmax",)) == "Allow more patterns, or lower min."


def test_the_advice_names_the_sqnr_limit_that_faster_candidates_miss():
    evidence = faster_case().evidence
    search = evidence.search
    noisy = replace(search.trials[-1], number=99, ratio=0.1, sqnr_db=12.0, all_data_db=None)
    for limit, named in ((20.0, True), (10.0, False)):
        limits = replace(search.limits, min_sqnr_db=limit)
        held = replace(search, limits=limits, trials=(*search.trials, noisy))
        found = faster_advice(replace(evidence, search=held), "lower min")
        assert ("ower tune.min_sqnr_db (1 faster candidate below it)" in found) == named


def test_the_failed_check_of_an_unchanged_model_lists_its_candidates():
    sections = judge("speedup", ALONE, min=1.2).sections
    (listed,) = [section for section in sections if section.title == "Candidates that were not selected"]
    assert [row[0] for row in listed.rows] == ["fastest candidate", "everything quantized"]
    assert "2 kernels with quantized inputs run in float (HardSwish)" in listed.text


# ---- speedup ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.2, 5), min_size=3, max_size=3).map(sorted), st.floats(0.2, 5))
def test_the_outcome_follows_from_the_interval(bounds: list[float], least: float) -> None:
    low, median, high = bounds
    outcome = judge_interval(Interval(median=median, low=low, high=high), least)
    assert (outcome == "pass") == (median >= least)
    assert (outcome == "fail") == (high < least)


@pytest.mark.parametrize(
    ("least", "outcome", "headline"),
    [
        (1.24, "pass", "1.25x as fast, at least 1.21x, asked 1.24x"),
        (1.3, "inconclusive", "1.25x as fast (95 % in this run: 1.18 to 1.33): too noisy to tell from 1.30x"),
        (1.4, "fail", "only 1.25x as fast, at most 1.34x, asked 1.40x"),
    ],
)
def test_a_speedup_is_stated_with_the_bound_that_decides(least: float, outcome: str, headline: str) -> None:
    assert FASTER.latency is not None
    mean, both = (Interval(median=0.8, low=0.8 - by, high=0.8 + by) for by in (0.02, 0.05))
    tested = {"tuned": RatioTest(mean=mean, enclosing=both)}
    verdict = judge("speedup", replace(FASTER, latency=replace(FASTER.latency, tested=tested)), min=least)
    assert (verdict.outcome, verdict.headline) == (outcome, headline)


def test_an_unchanged_model_has_speedup_one_and_fails() -> None:
    verdict = judge("speedup", ALONE, min=1.3)
    assert verdict.outcome == "fail"
    assert verdict.headline == "1.00x, unchanged: no faster placement was selected; asked 1.30x"
    assert verdict.numbers["speedup"] == 1.0
    assert "The model is unchanged" in verdict.advice
    assert judge("speedup", ALONE, min=1).outcome == "pass"


# ---- parity -------------------------------------------------------------------------------------


def test_every_output_must_be_within_every_limit_and_the_headline_is_of_the_worst() -> None:
    evidence = with_outputs(output("fine"), output("bad", 12.0), output("worse", 9.0))
    verdict = judge("parity", evidence, min_sqnr_db=20, max_steps=3)
    assert verdict.headline == "output 'worse': SQNR 9.0 dB < 20.0 dB"
    assert "'worse' has the largest difference" in verdict.advice
    assert [row[-1] for row in verdict.sections[0].rows] == ["fail", "fail", "pass", ""]


@pytest.mark.parametrize(
    "limit",
    [
        {"min_sqnr_db": 1},
        {"max_abs": 1e9},
    ],
)
def test_not_a_number_exceeds_every_limit(limit: dict) -> None:
    nan = math.nan
    evidence = with_outputs(output("x", nan, cosine=nan, max_abs=nan, max_steps=nan))
    verdict = judge("parity", evidence, **limit)
    assert verdict.outcome == "fail"
    assert "not a number" in verdict.headline


def test_outputs_that_are_not_floats_must_be_equal() -> None:
    same = output("label", math.inf, compared=False)
    assert judge("parity", with_outputs(output("x"), same), min_sqnr_db=20).outcome == "pass"
    differs = replace(same, matches=False, note="3 values differ")
    verdict = judge("parity", with_outputs(output("x"), differs), min_sqnr_db=20)
    assert verdict.headline == "output 'label': 3 values differ"
    assert (
        judge("parity", with_outputs(output("x"), differs), min_sqnr_db=20, outputs=["x"]).outcome == "pass"
    )


def in_steps(quantization_db: float, runtime_db: float, total_db: float = 15.0) -> Evidence:
    """Outputs with quantization errors of two steps."""
    parity = ParityEvidence(
        outputs=(output("y", total_db),),
        samples=4,
        data="evaluation",
        quantization=(output("y", quantization_db),),
        runtime=(output("y", runtime_db),),
    )
    return replace(FASTER, parity=parity)


@pytest.mark.parametrize(
    ("quantization_db", "runtime_db", "blamed", "advised"),
    [
        (15.1, 40.0, "quantization", "in its Q/DQ arithmetic, before any runtime"),
        (40.0, 15.1, "the runtime", "qdqspec explain"),
        (18.0, 18.5, "quantization and runtime", "has the largest difference."),
    ],
)
def test_a_failure_names_the_step_with_the_larger_error(
    quantization_db: float, runtime_db: float, blamed: str, advised: str
) -> None:
    verdict = judge("parity", in_steps(quantization_db, runtime_db), min_sqnr_db=20)
    assert verdict.headline == f"output 'y': SQNR 15.0 dB < 20.0 dB, by {blamed}"
    assert advised in verdict.advice


def test_errors_of_the_runtime_are_not_attributed_to_pairs() -> None:
    evidence = replace(in_steps(40.0, 15.1), culprits=sample_culprits())
    verdict = judge("parity", evidence, min_sqnr_db=20)
    assert not any(section.title.startswith("Noisiest") for section in verdict.sections)
    assert "patterns.nodes.exclude" in verdict.advice


def with_search(found: ParitySearch | None, **values: object) -> tuple[Evidence, dict]:
    """Evidence whose data is within the limits, and the result of an input search."""
    asked = {"min_sqnr_db": 10, "search": 200, **values}
    searches = {} if found is None else {params_of("parity", **asked).evidence_key: found}  # type: ignore[attr-defined]
    return replace(in_steps(15.1, 40.0), parity_search=searches), asked


def test_a_failure_on_the_data_is_reported_before_a_found_input() -> None:
    evidence, asked = with_search(sample_parity_search(found=True), min_sqnr_db=60)
    assert judge("parity", evidence, **asked).headline.startswith("output 'y': SQNR 15.0 dB < 60.0 dB")


def test_each_step_has_separate_limits() -> None:
    evidence = in_steps(26.0, 31.0, 25.0)
    assert judge(
        "parity", evidence, quantization={"min_sqnr_db": 20}, runtime={"min_sqnr_db": 30}
    ).headline == ("quantization and runtime keep their limits")
    verdict = judge("parity", evidence, min_sqnr_db=20, runtime={"min_sqnr_db": 35})
    assert verdict.headline == "the runtime alone, output 'y': SQNR 31.0 dB < 35.0 dB"
    assert "qdqspec explain" in verdict.advice
    verdict = judge("parity", evidence, quantization={"min_sqnr_db": 30, "max_abs": 0.001})
    assert verdict.headline == "quantization alone, output 'y': SQNR 26.0 dB < 30.0 dB"
    assert "before any runtime" in verdict.advice
    assert verdict.numbers["quantization_sqnr_db"] == 26
    assert verdict.numbers["runtime_sqnr_db"] == 31


def test_limits_of_steps_are_inconclusive_if_steps_could_not_be_separated() -> None:
    parity = replace(
        with_outputs(output("y")).parity,  # type: ignore[type-var]  # it is there
        undivided="onnxruntime does not compute it unfused: no kernel for MyOp",
    )
    evidence = replace(FASTER, parity=parity)
    verdict = judge("parity", evidence, min_sqnr_db=20, runtime={"min_sqnr_db": 30})
    assert verdict.outcome == "inconclusive"
    assert "no kernel for MyOp" in verdict.advice
    assert judge("parity", evidence, min_sqnr_db=20).outcome == "pass"
    assert judge("parity", evidence, min_sqnr_db=60, runtime={"min_sqnr_db": 30}).outcome == "fail"


def test_agreement_is_judged_for_outputs_with_classes() -> None:
    evidence = with_outputs(output("boxes"), output("y", agreement={"top1": 0.97, "top5": 0.991}))
    verdict = judge("parity", evidence, min_agreement="98%")
    assert verdict.headline == "output 'y': top1 agreement 97.0 % < 98.0 %"
    assert verdict.numbers["agreement"] == 0.97
    verdict = judge("parity", evidence, top_k=5, min_agreement=0.99)
    assert verdict.headline == "agreement 99.1 % >= 99.0 %"
    verdict = judge("parity", evidence, top_k=7, min_agreement="98%")
    assert verdict.outcome == "inconclusive"
    assert verdict.headline == "no output has more than 7 classes: nothing to judge"


def test_a_limit_on_slices_names_output_axis_and_slice() -> None:
    worst = WorstSlice(axis=1, index=4, sqnr_db=1.13)
    evidence = with_outputs(output("boxes", 52.8, worst_slice=worst), output("other", 31.0))
    failed = judge("parity", evidence, min_slice_sqnr_db=20)
    assert failed.outcome == "fail"
    assert failed.headline == "output 'boxes': slice 4 of axis 1: 1.1 dB < 20.0 dB"
    assert failed.numbers["slice_sqnr_db"] == pytest.approx(1.13)
    assert judge("parity", evidence, min_slice_sqnr_db=1).headline == "worst slice 1.1 dB >= 1.0 dB"
    assert judge("parity", evidence, min_slice_sqnr_db=1, outputs=["boxes"]).outcome == "pass"
    missing = judge("parity", evidence, min_slice_sqnr_db=1, outputs=["other"])
    assert (missing.outcome, missing.headline) == (
        "inconclusive",
        "no output has a slice with enough values: nothing to judge",
    )


@pytest.mark.parametrize(
    ("slice_db", "limits", "is_noted"),
    [(1.1, {}, True), (32.0, {}, False), (1.1, {"min_slice_sqnr_db": 1}, False)],
)
def test_a_slice_far_below_its_output_is_noted_unless_it_has_a_limit(
    slice_db: float, limits: dict, is_noted: bool
) -> None:
    worst = WorstSlice(axis=1, index=4, sqnr_db=slice_db)
    evidence = with_outputs(output("boxes", 52.8, worst_slice=worst))
    verdict = judge("parity", evidence, min_sqnr_db=20, **limits)
    assert verdict.outcome == "pass"
    texts = [section.text for section in verdict.sections if section.text]
    assert len(texts) == is_noted
    for text in texts:
        assert text.startswith("output 'boxes' has 52.8 dB over all, but slice 4 of axis 1 has 1.1 dB")
        assert "\n" not in text
        assert "min_slice_sqnr_db" in text


@given(st.text(max_size=300))
def test_the_headline_is_short_and_printable_for_any_output_name(name: str) -> None:
    verdict = judge("parity", with_outputs(output(name, 3.0)), min_sqnr_db=20)
    assert len(verdict.headline) < 80
    assert verdict.headline.isprintable()


# ---- accuracy -----------------------------------------------------------------------------------


def scored(reference: float, tuned: float, name: str = "top1") -> Evidence:
    found = AccuracyEvidence(metric=name.partition(":")[0], reference=reference, tuned=tuned, samples=100)
    return replace(DIGITS, accuracy={name: found})


@pytest.mark.parametrize(
    ("reference", "tuned", "limits", "outcome", "headline"),
    [
        (0.97, 0.96, {"max_drop": "1%"}, "pass", "top1 fell by 1.0 % (97.0 % to 96.0 %), allowed 1.0 %"),
        (0.97, 0.96, {"min": 0.96}, "pass", None),
        (0.97, 0.959, {"max_drop": "1%"}, "fail", "top1 fell by 1.1 % (97.0 % to 95.9 %), allowed 1.0 %"),
        (0.95, 0.96, {"max_drop": "1%"}, "pass", "top1 did not fall (95.0 % to 96.0 %), allowed 1.0 %"),
    ],
)
def test_a_score_is_compared_with_its_limits(
    reference: float, tuned: float, limits: dict, outcome: str, headline: str | None
) -> None:
    """Values equal to a limit pass, although 0.97 - 0.96 > 0.01 in binary fractions."""
    verdict = judge("accuracy", scored(reference, tuned), **limits)
    assert verdict.outcome == outcome
    assert headline in (None, verdict.headline)


def test_each_output_has_its_own_accuracy() -> None:
    evidence = scored(0.9, 0.9, "top1:logits")
    assert judge("accuracy", evidence, min=0.5, output="logits").outcome == "pass"
    assert judge("accuracy", evidence, min=0.5).outcome == "inconclusive"


@pytest.mark.parametrize(
    ("lost", "gained", "low", "high"),
    [(0, 0, -0.0192, 0.0192), (2, 1, -0.0286, 0.0482), (10, 0, 0.0372, 0.1589)],
)
def test_the_interval_of_a_drop_is_that_of_agresti_and_min(
    lost: int, gained: int, low: float, high: float
) -> None:
    """Computed by hand: two pseudo-samples are added to 100 samples, half a sample to each of the four cells."""
    found = drop_interval(lost, gained, 100)
    assert found.median == (lost - gained) / 100
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize("limits", [{"min": 0.1}, {"max_drop": 1e9}])
def test_a_metric_that_is_not_a_number_exceeds_every_limit(limits: dict) -> None:
    verdict = judge("accuracy", scored(34.0, math.nan, "psnr"), metric="psnr", **limits)
    assert verdict.outcome == "fail"
    assert "nan" in verdict.headline


# ---- placement and size -------------------------------------------------------------------------


def test_a_misspelt_requirement_has_a_suggestion() -> None:
    verdict = judge("placement", FASTER, require=["Cov"])
    assert (verdict.outcome, verdict.headline) == ("fail", "required Cov: no such node")
    assert "(did you mean 'Conv'?)" in verdict.advice
    assert "did you mean" not in judge("placement", FASTER, require=["Softmax"]).advice


@pytest.mark.parametrize(
    ("require", "headline"),
    [
        ([{"Conv": 13}], "required Conv: 12 of 26 nodes quantized, 13 asked"),
        ({"Conv": "all"}, "required Conv: 12 of 26 nodes quantized, all asked"),
        (["Conv", {"fire1/conv": "all"}], "12 activation pairs: 2 rules held"),
    ],
)
def test_an_entry_may_require_a_number_of_nodes_or_all(require, headline: str) -> None:
    assert judge("placement", FASTER, require=require).headline == headline


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"forbid": ["fire2?/*", "Softmax"]}, "pass"),
        ({"forbid": ["fire1?/*"]}, "fail"),
        ({"forbid": ["Conv"]}, "fail"),
        ({"max_pairs": 11}, "fail"),  # weight pairs do not count
        ({"min_pairs": 12}, "pass"),
    ],
)
def test_limits_of_placement_are_on_op_types_globs_of_nodes_and_pairs(limits: dict, outcome: str) -> None:
    assert judge("placement", FASTER, **limits).outcome == outcome


def test_an_unchanged_model_has_no_pairs() -> None:
    assert judge("placement", ALONE, forbid=["Conv"]).headline == "0 activation pairs, unchanged: 1 rule held"
    assert "The model is unchanged" in judge("placement", ALONE, require=["Conv"]).advice


def test_sizes_that_differ_are_printed_with_enough_digits() -> None:
    evidence = replace(FASTER, size_bytes={"reference": 2**21, "tuned": 2**20 + 1})
    assert judge("size", evidence, max_bytes="1MiB").headline == "1048577 B > budget 1048576 B"
    assert (
        judge("size", evidence, max_ratio=0.5).headline == "0.50000 of the reference's size > budget 0.50000"
    )


def test_lint_ignores_accepted_rules_and_fails_on_slow_findings_if_strict() -> None:
    found = replace(FASTER, lint=sample_lint("tensorrt-11"))
    assert judge("lint", found, target="tensorrt-11").outcome == "fail"
    accepted = judge("lint", found, target="tensorrt-11", ignore=["TRT001"])
    assert (accepted.outcome, accepted.numbers["slow"]) == ("pass", 1)
    assert judge("lint", found, target="tensorrt-11", ignore=["TRT001"], strict=True).outcome == "fail"
