"""The verdict of each check on given evidence: outcome, headline, numbers and advice."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, strategies as st
from sample_evidence import placed, sample_culprits, sample_lint, sample_parity_search

from qdqspec.checks.kinds.accuracy import drop_interval
from qdqspec.checks.rejected import faster_advice
from qdqspec.testing.records import alone_case, cached_case, check_named, faster_case, params_of
from qdqspec.types import (
    AccuracyEvidence,
    BuildEvidence,
    DeviceKey,
    Evidence,
    Interval,
    ParityEvidence,
    PatternRules,
    ProfileLatency,
    RatioTest,
    Samples,
    TensorParity,
    Verdict,
    WorstSlice,
)
from qdqspec.types.requests import BuildRequest

FASTER = faster_case().evidence
ALONE = alone_case().evidence
DIGITS = cached_case().evidence


def judge(kind: str, evidence: Evidence, **values: object) -> Verdict:
    return check_named(kind).judge(params_of(kind, **values), evidence)


def with_latency(evidence: Evidence, **fields: object) -> Evidence:
    assert evidence.latency is not None
    return replace(evidence, latency=replace(evidence.latency, **fields))


def near(by: float) -> Interval:
    return Interval(median=0.8, low=0.8 - by, high=0.8 + by)


def timed(*wall: float, cpu: tuple[float, ...] = ()) -> Evidence:
    samples = {"reference": Samples(wall_ms=(2.0,)), "tuned": Samples(wall_ms=wall, cpu_ms=cpu)}
    ratio = median(wall) / 2.0
    ratios = {
        "reference": Interval(median=1, low=1, high=1),
        "tuned": Interval(median=ratio, low=0.9 * ratio, high=1.1 * ratio),
    }
    return with_latency(FASTER, samples=samples, ratios=ratios, clock="wall")


def ended(ended_by: str, expected: str = "", **patterns: tuple[str, ...]) -> Evidence:
    assert FASTER.search is not None
    case = replace(FASTER.case, patterns=PatternRules(**patterns))
    return replace(FASTER, case=case, search=replace(FASTER.search, ended_by=ended_by, ended=expected))


def with_outputs(*outputs: TensorParity) -> Evidence:
    return replace(FASTER, parity=ParityEvidence(outputs=outputs, samples=4, data="evaluation"))


def output(name: str, sqnr_db: float = 40.0, **values: object) -> TensorParity:
    facts: dict = {"cosine": 0.9999, "max_abs": 0.01, "max_steps": 1.0, **values}
    return TensorParity(name=name, sqnr_db=sqnr_db, **facts)


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


def scored(reference: float, tuned: float, name: str = "top1") -> Evidence:
    found = AccuracyEvidence(metric=name.partition(":")[0], reference=reference, tuned=tuned, samples=100)
    return replace(DIGITS, accuracy={name: found})


# ---- verdicts: kind, evidence, parameters, outcome, headline --------------------------------------

SLOW_TAIL = timed(*([1.0] * 90), *([5.0] * 10))
TWO_PROFILES = with_latency(
    timed(3.0, 3.2),
    profiles=tuple(ProfileLatency(name=name, share=0.5, ratios={}) for name in ("x 1", "x 8")),
    samples={
        "tuned": Samples(
            wall_ms=(3.0, 3.2), profiles=(Samples(wall_ms=(1.0, 1.2)), Samples(wall_ms=(9.0, 9.4)))
        )
    },
)
# The CPU speed differed between the runs of tuned model and reference: the median of the tuned runs alone is 3.64.
DRIFTED = with_latency(
    timed(3.64, 3.64, 3.64),
    ratios={"tuned": Interval(median=0.97, low=0.96, high=0.98)},
    samples={"tuned": Samples(wall_ms=(3.64, 3.64, 3.64)), "reference": Samples(wall_ms=(3.95, 3.95))},
)
TESTED = with_latency(FASTER, tested={"tuned": RatioTest(mean=near(0.02), enclosing=near(0.05))})
LABELS = output("label", math.inf, compared=False)
ONE_NUMBER = output("score", is_single=True)
DIFFERENT = with_outputs(output("x"), replace(LABELS, matches=False, note="3 values differ"))
CLASSES = with_outputs(output("boxes"), output("y", agreement={"top1": 0.97, "top5": 0.991}))
SLICES = with_outputs(
    output("boxes", 52.8, worst_slice=WorstSlice(axis=1, index=4, sqnr_db=1.13)), output("other", 31.0)
)
NO_NUMBER = with_outputs(output("x", math.nan, cosine=math.nan, max_abs=math.nan, max_steps=math.nan))
STEPS = in_steps(26.0, 31.0, 25.0)
UNDIVIDED = replace(
    FASTER,
    parity=ParityEvidence(
        outputs=(output("y"),), samples=4, data="evaluation", undivided="no kernel for MyOp"
    ),
)


def built(build: BuildEvidence) -> Evidence:
    return replace(FASTER, builds={BuildRequest().key: build})


MIXED = built(
    placed(
        ("Conv", "npu", True), ("Conv", "npu", False), ("LayerNormalization", "cpu", False), ("Relu", "npu-2", True)
    )
)  # fmt: skip
REFUSED = built(BuildEvidence(backend="onnxruntime-qnn", refused="MEM_ALLOC 1002", cure="choose a chip"))
BUILT = BuildEvidence(backend="tensorrt-rtx", target="SM86", kernels=49, narrow=24, heavy=26)
SIZES = replace(FASTER, size_bytes={"reference": 2**21, "tuned": 2**20 + 1})
LINT = replace(FASTER, lint=sample_lint("tensorrt-11"))

JUDGED: list[tuple[str, Evidence, dict, str, str]] = [
    ("latency", timed(1.2, 1.2), {"max_ms": 1.2}, "pass", "median 1.20 ms <= budget 1.20 ms (+0.0 %)"),
    ("latency", timed(1.2001), {"max_ms": 1.2}, "fail", "median 1.2001 ms > budget 1.2000 ms (+0.0 %)"),
    ("latency", timed(4.5), {"max_ms": 0.001}, "fail", "median 4.50 ms > budget 0.0010 ms (4500x)"),
    ("latency", timed(3, cpu=(1,)), {"max_ms": 2}, "fail", "median 3.00 ms > budget 2.00 ms (+50.0 %)"),
    ("latency", timed(3, cpu=(1,)), {"max_ms": 2, "clock": "cpu"}, "pass", ""),
    ("latency", timed(1.0), {"max_ms": 2, "clock": "cpu"}, "inconclusive", ""),
    (
        "latency", SLOW_TAIL, {"max_ms": {"p50": 2, "p95": 6}},
        "pass", "p95 5.00 ms <= budget 6.00 ms (-16.7 %)",
    ),
    (
        "latency", SLOW_TAIL, {"max_ms": {"p50": 2, "p95": 4}},
        "fail", "p95 5.00 ms > budget 4.00 ms (+25.0 %)",
    ),
    ("latency", TWO_PROFILES, {"max_ms": 5}, "pass", "median 3.10 ms <= budget 5.00 ms (-38.0 %)"),
    (
        "latency", TWO_PROFILES, {"max_ms": 5, "profile": 1},
        "fail", "median at x 8 9.20 ms > budget 5.00 ms (+84.0 %)",
    ),
    (
        "latency", TWO_PROFILES, {"max_ms": 5, "profile": 2},
        "fail", "shape profile 2 was not among the 2 measured",
    ),
    ("latency", timed(3.0), {"max_ms": 5, "profile": 0}, "pass", ""),  # a single shape profile is the first
    ("latency", DRIFTED, {"max_ms": 3.7}, "fail", "median 3.83 ms > budget 3.70 ms (+3.6 %)"),
    # the 99th percentile of twenty runs is nearly that of the slowest run
    (
        "latency", timed(*([1.0] * 19), 9.0), {"max_ms": 2, "percentile": 99},
        "inconclusive", "p99 7.48 ms of 20 runs: too few to judge against budget 2.00 ms",
    ),
    ("latency", timed(*([1.0] * 18), 9.0, 9.0), {"max_ms": 2, "percentile": 99}, "fail", ""),
    ("speedup", TESTED, {"min": 1.24}, "pass", "1.25x as fast, at least 1.21x, asked 1.24x"),
    (
        "speedup", TESTED, {"min": 1.3},
        "inconclusive", "1.25x as fast (95 % in this run: 1.18 to 1.33): too noisy to tell from 1.30x",
    ),
    (
        "speedup", ALONE, {"min": 1.3},
        "fail", "1.00x, unchanged: no faster placement was selected; asked 1.30x",
    ),
    ("speedup", ALONE, {"min": 1}, "pass", ""),
    (
        "parity", with_outputs(output("fine"), output("bad", 12.0), output("worse", 9.0)),
        {"min_sqnr_db": 20, "max_steps": 3}, "fail", "output 'worse': SQNR 9.0 dB < 20.0 dB",
    ),
    ("parity", NO_NUMBER, {"min_sqnr_db": 1}, "fail", "output 'x': SQNR not a number < 1.0 dB"),
    ("parity", with_outputs(output("x", 12.3)), {"min_sqnr_db": 19.996}, "fail",
     "output 'x': SQNR 12.300 dB < 19.996 dB"),
    ("parity", with_outputs(ONE_NUMBER), {"min_cosine": 0.99}, "inconclusive", ""),
    ("parity", with_outputs(ONE_NUMBER), {"min_cosine": 0.99, "max_abs": 1}, "pass", ""),
    ("parity", with_outputs(ONE_NUMBER, output("x")), {"min_cosine": 0.99}, "pass", ""),
    ("parity", with_outputs(replace(ONE_NUMBER, sqnr_db=math.inf)), {"min_cosine": 0.99}, "pass", ""),
    ("parity", with_outputs(output("x"), LABELS), {"min_sqnr_db": 20}, "pass", ""),
    ("parity", DIFFERENT, {"min_sqnr_db": 20}, "fail", "output 'label': 3 values differ"),
    ("parity", DIFFERENT, {"min_sqnr_db": 20, "outputs": ["x"]}, "pass", ""),
    (
        "parity", in_steps(15.1, 40.0), {"min_sqnr_db": 20},
        "fail", "output 'y': SQNR 15.0 dB < 20.0 dB, by quantization",
    ),
    (
        "parity", in_steps(40.0, 15.1), {"min_sqnr_db": 20},
        "fail", "output 'y': SQNR 15.0 dB < 20.0 dB, by the runtime",
    ),
    (
        "parity", in_steps(18.0, 18.5), {"min_sqnr_db": 20},
        "fail", "output 'y': SQNR 15.0 dB < 20.0 dB, by quantization and runtime",
    ),
    (
        "parity", STEPS, {"quantization": {"min_sqnr_db": 20}, "runtime": {"min_sqnr_db": 30}},
        "pass", "quantization and runtime keep their limits",
    ),
    (
        "parity", STEPS, {"min_sqnr_db": 20, "runtime": {"min_sqnr_db": 35}},
        "fail", "the runtime alone, output 'y': SQNR 31.0 dB < 35.0 dB",
    ),
    (
        "parity", STEPS, {"quantization": {"min_sqnr_db": 30, "max_abs": 0.001}},
        "fail", "quantization alone, output 'y': SQNR 26.0 dB < 30.0 dB",
    ),
    ("parity", UNDIVIDED, {"min_sqnr_db": 20, "runtime": {"min_sqnr_db": 30}}, "inconclusive", ""),
    ("parity", UNDIVIDED, {"min_sqnr_db": 60, "runtime": {"min_sqnr_db": 30}}, "fail", ""),
    ("parity", CLASSES, {"min_agreement": "98%"}, "fail", "output 'y': top1 agreement 97.0 % < 98.0 %"),
    ("parity", CLASSES, {"top_k": 5, "min_agreement": 0.99}, "pass", "agreement 99.1 % >= 99.0 %"),
    (
        "parity", CLASSES, {"top_k": 7, "min_agreement": "98%"},
        "fail", "no output has more than 7 classes: nothing to judge",
    ),
    (
        "parity", CLASSES, {"class_axis": 5, "min_agreement": "98%"},
        "fail", "no output has more than 1 class along axis 5: nothing to judge",
    ),
    (
        "parity", CLASSES, {"min_sqnr_db": 20, "outputs": ["y", "bxes"]},
        "fail", "no output has the name 'bxes' given in outputs (did you mean 'boxes'?)",
    ),
    (
        "parity", SLICES, {"min_slice_sqnr_db": 20},
        "fail", "output 'boxes': slice 4 of axis 1: 1.1 dB < 20.0 dB",
    ),
    (
        "parity", SLICES, {"min_slice_sqnr_db": 1, "outputs": ["other"]},
        "inconclusive", "no output has a slice with enough values: nothing to judge",
    ),
    # equal to a limit, although 0.97 - 0.96 > 0.01 in binary fractions
    (
        "accuracy", scored(0.97, 0.96), {"max_drop": "1%"},
        "pass", "top1 fell by 1.0 % (97.0 % to 96.0 %), allowed 1.0 %",
    ),
    (
        "accuracy", scored(0.95, 0.96), {"max_drop": "1%"},
        "pass", "top1 did not fall (95.0 % to 96.0 %), allowed 1.0 %",
    ),
    ("accuracy", scored(0.9, 0.9, "top1:logits"), {"min": 0.5, "output": "logits"}, "pass", ""),
    ("accuracy", scored(0.9, 0.9, "top1:logits"), {"min": 0.5}, "inconclusive", ""),
    ("accuracy", scored(34.0, math.nan, "psnr"), {"metric": "psnr", "min": 0.1}, "fail", "psnr nan < 0.1"),
    (
        "placement", FASTER, {"forbid": ["fire2?/*", "head/*", "LSTM"]},
        "pass", "12 activation pairs: 3 rules held; no node has the forbidden name head/*",
    ),
    ("placement", FASTER, {"require": ["Cov"]}, "fail", "required Cov: no such node"),
    (
        "placement", FASTER, {"require": ["Conv", {"fire1/conv": "all"}]},
        "pass", "12 activation pairs: 2 rules held",
    ),
    ("placement", ALONE, {"forbid": ["Conv"]}, "pass", "0 activation pairs, unchanged: 1 rule held"),
    ("placement", ALONE, {"require": {}, "forbid": ["Conv"]}, "pass", "0 activation pairs, unchanged: 1 rule held"),
    ("size", SIZES, {"max_bytes": "1MiB"}, "fail", "1048577 B > budget 1048576 B"),
    ("size", SIZES, {"max_ratio": 0.5}, "fail", "0.50000 of the reference's size > budget 0.50000"),
    (
        "partition", MIXED, {"max_cpu_nodes": 1, "max_partitions": 2, "min_integer": {"Conv": 1}},
        "pass", "1 node on the CPU, 2 parts, 2 nodes in integers",
    ),
    ("partition", MIXED, {"max_partitions": 1}, "fail", "2 parts on the device, more than 1"),
    ("partition", MIXED, {"min_integer": {"Conv": "all"}}, "fail", "1 of 2 Conv in integers, fewer than 2"),
    ("partition", REFUSED, {"max_cpu_nodes": 0}, "fail", "refused: MEM_ALLOC 1002"),
    ("partition", built(placed(("Conv", "", True))), {"max_cpu_nodes": 0}, "inconclusive", ""),  # places are not told
    (
        "builds", replace(FASTER, builds={"tensorrt-rtx:SM86": BUILT}),
        {"backend": "tensorrt-rtx", "for": ["SM86"], "min_8bit": 0.95},
        "fail", "only 24 of 26 heavy kernels compute in 8 bits for SM86; asked 95.0 %",
    ),
    ("lint", LINT, {"target": "tensorrt-11", "ignore": ["TRT001"]}, "pass", ""),
    ("lint", LINT, {"target": "tensorrt-11", "ignore": ["TRT001"], "strict": True}, "fail", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "evidence", "values", "outcome", "headline"), JUDGED)
def test_a_check_judges_its_limits(kind, evidence, values, outcome, headline) -> None:
    verdict = judge(kind, evidence, **values)
    assert verdict.outcome == outcome
    assert headline in ("", verdict.headline)


ADVICE: list[tuple[str, Evidence, dict, str]] = [
    ("latency", timed(*([1.0] * 19), 9.0), {"max_ms": 2, "percentile": 99}, "at least 100 runs"),
    ("speedup", ALONE, {"min": 1.3}, "The model is unchanged"),
    ("speedup", ended("its limit of 5 min 00 s"), {"min": 1.9}, "tune.minutes"),
    ("speedup", ended("the time limit of the run"), {"min": 1.9}, "--qdq-time-limit"),
    ("speedup", ended(""), {"min": 1.9}, "Use another number format, or lower min."),  # it was complete
    (
        "speedup",
        ended("expected gain below 1 %", "less than 1%"),
        {"min": 1.9},
        "Use another number format, or",
    ),
    ("speedup", ended("", deny=("Softmax",)), {"min": 1.9}, "Allow more patterns, or lower min."),
    ("parity", in_steps(15.1, 40.0), {"min_sqnr_db": 20}, "in its Q/DQ arithmetic, before any runtime"),
    ("parity", in_steps(40.0, 15.1), {"min_sqnr_db": 20}, "qdqspec explain"),
    ("parity", in_steps(18.0, 18.5), {"min_sqnr_db": 20}, "'y' has the largest difference."),
    ("parity", UNDIVIDED, {"min_sqnr_db": 20, "runtime": {"min_sqnr_db": 30}}, "no kernel for MyOp"),
    ("partition", REFUSED, {"max_cpu_nodes": 0}, "choose a chip"),
    ("placement", FASTER, {"require": ["Cov"]}, "(did you mean 'Conv'?)"),
    ("placement", ALONE, {"require": ["Conv"]}, "The model is unchanged"),
]


@pytest.mark.parametrize(("kind", "evidence", "values", "advice"), ADVICE)
def test_the_advice_depends_on_the_evidence(kind: str, evidence: Evidence, values: dict, advice: str) -> None:
    assert advice in judge(kind, evidence, **values).advice


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


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=150),
    st.just(0) | st.floats(1, 100),
    st.floats(0.01, 100),
    st.floats(1, 3),
)
def test_a_larger_budget_never_gives_a_worse_outcome(values, percent, budget, more) -> None:
    order = ["fail", "inconclusive", "pass"]
    tight, loose = (
        judge("latency", timed(*values), max_ms=ms, percentile=percent).outcome
        for ms in (budget, budget * more)
    )
    assert order.index(loose) >= order.index(tight)
    if percent <= 50:
        assert "inconclusive" not in (tight, loose)


def test_the_advice_names_the_sqnr_limit_that_faster_candidates_miss():
    search = FASTER.search
    noisy = replace(search.trials[-1], number=99, ratio=0.1, sqnr_db=12.0, all_data_db=None)
    for limit, named in ((20.0, True), (10.0, False)):
        limits = replace(search.limits, min_sqnr_db=limit)
        held = replace(search, limits=limits, trials=(*search.trials, noisy))
        found = faster_advice(replace(FASTER, search=held), "lower min")
        assert ("ower tune.min_sqnr_db (1 faster candidate below it)" in found) == named


@pytest.mark.parametrize(("limits", "is_noted"), [({}, True), ({"min_slice_sqnr_db": 1}, False)])
def test_a_slice_far_below_its_output_is_noted_unless_it_has_a_limit(limits: dict, is_noted: bool) -> None:
    verdict = judge("parity", SLICES, min_sqnr_db=20, **limits)
    assert verdict.outcome == "pass"
    text = "output 'boxes' has 52.8 dB over all, but slice 4 of axis 1 has 1.1 dB"
    assert any(section.text.startswith(text) for section in verdict.sections) == is_noted


def test_a_failed_check_of_an_unchanged_model_lists_its_candidates() -> None:
    sections = judge("speedup", ALONE, min=1.3).sections
    (listed,) = (each for each in sections if each.title == "Candidates that were not selected")
    assert [row[0] for row in listed.rows] == ["fastest candidate", "everything quantized"]


def test_a_limit_is_written_with_its_own_digits() -> None:
    verdict = judge("parity", with_outputs(output("x")), min_cosine=0.99999, min_sqnr_db=20)
    assert verdict.sections[0].rows[-1] == ("limit", ">= 20.0 dB", ">= 0.99999", "", "", "")


def test_errors_of_the_runtime_are_not_attributed_to_pairs() -> None:
    evidence = replace(in_steps(40.0, 15.1), culprits=sample_culprits())
    verdict = judge("parity", evidence, min_sqnr_db=20)
    assert not any(section.title.startswith("Noisiest") for section in verdict.sections)
    assert "patterns.nodes.exclude" in verdict.advice


def test_a_failure_on_the_data_is_reported_before_a_found_input() -> None:
    asked = {"min_sqnr_db": 60, "search": 200}
    key = params_of("parity", **asked).evidence_key  # type: ignore[attr-defined]
    evidence = replace(in_steps(15.1, 40.0), parity_search={key: sample_parity_search(found=True)})
    assert judge("parity", evidence, **asked).headline.startswith("output 'y': SQNR 15.0 dB < 60.0 dB")


@given(st.text(max_size=300))
def test_the_headline_is_short_and_printable_for_any_output_name(name: str) -> None:
    verdict = judge("parity", with_outputs(output(name, 3.0)), min_sqnr_db=20)
    assert len(verdict.headline) < 80
    assert verdict.headline.isprintable()


@pytest.mark.parametrize(
    ("lost", "gained", "low", "high"),
    [(0, 0, -0.0192, 0.0192), (2, 1, -0.0286, 0.0482), (10, 0, 0.0372, 0.1589)],
)
def test_the_interval_of_a_drop_is_that_of_agresti_and_min(lost, gained, low, high) -> None:
    """Computed by hand: two pseudo-samples are added to 100 samples, half a sample to each of the four cells."""
    found = drop_interval(lost, gained, 100)
    assert found.median == (lost - gained) / 100
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
