"""Sample measurements, and records in the form that reports take, made without measuring anything.

The numbers are invented but plausible, and the same on each machine. The real checks make the verdicts.
``sample_run()`` contains a model that became faster, an unchanged model, and a model with accuracy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qdqspec._core.registry import DEFAULT_BACKEND, resolve
from qdqspec.checks import Check, CheckParams
from qdqspec.types import (
    EXACT_DB,
    NO_PAIRS,
    AccuracyBound,
    AccuracyEvidence,
    BaselineFigure,
    BlockError,
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    Consumer,
    CorrectionGain,
    DeviceKey,
    Evidence,
    FrontPoint,
    Interval,
    KernelComparison,
    LatencyEvidence,
    ParityEvidence,
    PlaceChange,
    PlacedPair,
    Placement,
    Provenance,
    QuantizedWork,
    Race,
    RatioTest,
    RegressionEvidence,
    RejectedCandidate,
    RunRecord,
    Samples,
    SearchResult,
    Site,
    TensorParity,
    TimeChange,
    Trial,
)


def sample_latency(medians: Mapping[str, float], *, runs: int = 60, seed: int = 7) -> LatencyEvidence:
    """Times around the medians with a long right tail like measured ones, on both clocks."""
    rng = random.Random(seed)  # noqa: S311 - a sample, not a secret
    by_median: dict[float, Samples] = {}
    for median in dict.fromkeys(medians.values()):
        cpu = tuple(round(median * (0.985 + rng.expovariate(1 / 0.025)), 6) for _ in range(runs))
        wall = tuple(round(value * (1.01 + rng.expovariate(1 / 0.06)), 6) for value in cpu)
        by_median[median] = Samples(wall_ms=wall, cpu_ms=cpu)
    reference, tuned = medians["reference"], medians["tuned"]
    ratios = {
        role: _interval(median / reference, same=median == reference) for role, median in medians.items()
    }
    return LatencyEvidence(
        clock="cpu",
        samples={role: by_median[median] for role, median in medians.items()},
        ratios=ratios,
        speedup=_interval(reference / tuned, same=tuned == reference),
        builds=3,
        tested={
            role: RatioTest(mean=ratio.widened(0.6), enclosing=ratio.widened(0.8))
            for role, ratio in ratios.items()
        },
    )


def sample_search(
    pairs: tuple[PlacedPair, ...], ratios: tuple[float | None, ...], *, unchanged: bool = False
) -> SearchResult:
    """A search with one trial per ratio; ``None`` is a failed one. The best so far becomes the incumbent."""
    winner = Placement(sites=frozenset(pair.site for pair in pairs))
    best = 1.0
    trials = []
    for number, ratio in enumerate(ratios):
        faster = ratio is not None and (number == 0 or ratio < best * 0.985)
        trials.append(_trial(number, ratio, best, faster=faster))
        best = ratio if faster and ratio is not None else best
    return SearchResult(
        winner=winner,
        trials=tuple(trials),
        unchanged=unchanged,
        reason="no candidate was faster than the reference in its race" if unchanged else "confirmed",
        strategy="attribution",
        seconds=96.4,
        cpu_seconds=91.2,
        float_runs=2140.0,
        ended_by=f"its limit of {len(ratios)} builds",
        cut_short=f"the search ended at its limit of {len(ratios)} builds, before it was done: {len(ratios) - 1} of "
        f"about {len(ratios)} candidates built, give it more with --trials {2 * len(ratios)} (tune.trials)",
        eps=0.014,
        blocks=11,
        regions=14,
        patterns=6,
    )


def sample_rejected() -> tuple[RejectedCandidate, ...]:
    """Two candidates that were not selected: the fastest, whose kernels lose little, and everything quantized."""
    fastest = RejectedCandidate(
        role="fastest candidate",
        placement="5d1c09b2aa41f3e7",
        pairs=7,
        ratio=Interval(median=1.01, low=1.01, high=1.01),
        is_confirmed=False,
        sqnr_db=34.2,
        accuracy=None,
        reason="slower",
        kernels=KernelComparison(
            kernels=64,
            integer=9,
            unfused=6,
            left_in_float={"HardSwish": 2},
            reference_ms=4.3,
            tuned_ms=4.42,
            conversions_ms=0.31,
            slower_ms=0.12,
            faster_ms=-0.31,
            slower=(PlaceChange(place="fire3/conv + fire3/relu", reference_ms=0.42, tuned_ms=0.53),),
            faster=(PlaceChange(place="fire7/conv + fire7/relu", reference_ms=0.61, tuned_ms=0.33),),
        ),
    )
    everything = replace(
        fastest,
        role="everything quantized",
        placement="0b77fe4410c9d2a5",
        pairs=41,
        ratio=_interval(5.38 / 4.12),
        is_confirmed=True,
        sqnr_db=18.9,
        reason="1.1 dB below the SQNR limit of 20 dB (the default)",
        kernels=None,
    )
    return fastest, everything


def sample_regression(change: float, *, looks: int = 1) -> dict[str, RegressionEvidence]:
    """A comparison with a baseline, slower by ``change``, with bounds two per cent to each side."""
    moved = 1 + change
    return {
        "regression": RegressionEvidence(
            state="compared",
            file="__baselines__/squeezenet/sample-device.json",
            command="pytest specs/squeezenet.qdq.yaml::default::regression --qdq-update=changed",
            baseline=Interval(median=0.574, low=0.567, high=0.581),
            ratio=Interval(median=0.574 * moved, low=0.566 * moved, high=0.582 * moved),
            change=TimeChange(
                builds=Interval(median=moved, low=moved - 0.02, high=moved + 0.02),
                ranks=Interval(median=moved, low=moved - 0.01, high=moved + 0.01),
                p_value=0.0004 if abs(change) > 0.01 else 0.31,
            ),
            looks=looks,
            builds=6 if looks > 1 else 3,
            recorded="2026-01-08T14:00:00+00:00",
            notes=(f"{DEFAULT_BACKEND}: was 1.31.0, is 1.31.1",),
            history=(
                _figure(0.688, "2025-11-20T10:00:00+00:00"),
                _figure(0.571, "2025-12-12T16:30:00+00:00", "placement: was 2b41d0c7, is 77a0e913"),
                _figure(0.574, "2026-01-08T14:00:00+00:00", "model: was 9c0d1e55a1b2, is 3f3f3f3f3f3f"),
            ),
            elsewhere=(
                _figure(0.812, "2026-01-09T08:00:00+00:00", device=f"x86-64 avx2 {DEFAULT_BACKEND}-1.31"),
            ),
        )
    }


def _figure(ratio: float, recorded: str, *changed: str, device: str = "sample-device") -> BaselineFigure:
    interval = Interval(median=ratio, low=round(ratio - 0.007, 4), high=round(ratio + 0.007, 4))
    return BaselineFigure(device=device, ratio=interval, recorded=recorded, changed=changed)


def sample_front(search: SearchResult) -> SearchResult:
    """The search with both objectives, latency and accuracy: the selected point is in the middle of the front."""
    measured = zip(search.trials, (None, 24.1, 21.3, 31.0, 28.2), strict=True)
    trials = tuple(replace(trial, sqnr_db=sqnr_db) for trial, sqnr_db in measured)
    points = (
        (0.583, 9, 22.4, 0.9712),
        (0.64, 9, 28.2, 0.9806),
        (0.71, 6, 33.0, 0.9831),
        (1.0, 0, EXACT_DB, 0.9833),
    )
    front = tuple(
        FrontPoint(
            placement=search.winner.digest if pairs == 9 and ratio == 0.64 else f"{number:016x}",
            pairs=pairs,
            ratio=_interval(ratio, same=ratio == 1),
            sqnr_db=sqnr_db,
            accuracy=accuracy,
        )
        for number, (ratio, pairs, sqnr_db, accuracy) in enumerate(points)
    )
    gains, errors = sample_corrections(), sample_errors()
    return replace(search, trials=trials, front=front, errors=errors, corrections=gains)


def sample_corrections() -> tuple[CorrectionGain, ...]:
    """Two corrections that are applied, and one that does not help enough."""
    return (
        CorrectionGain(name="ranges", before_db=17.4, after_db=20.9, changed=11, taken=True),
        CorrectionGain(name="rounding", before_db=20.9, after_db=20.9, changed=0, taken=False),
        CorrectionGain(name="bias", before_db=20.9, after_db=22.3, changed=9, taken=True),
    )


def sample_errors() -> tuple[BlockError, ...]:
    """The error of fourteen blocks alone, in two labels, worst first."""
    levels = (14.2, 21.7, 24.0, 26.9, 29.3, 31.0, 33.8, 35.5, 38.1, 40.6, 42.0, 44.7, 51.3, 60.2)
    found = [
        BlockError(block=f"/layer{number % 4}/block{number}/Conv", label=label, sqnr_db=db + more)
        for number, db in enumerate(levels)
        for label, more in (("in+out", 0.0), ("in-only", 2.6))
    ]
    return tuple(sorted(found, key=lambda error: error.sqnr_db))


def sample_pairs(count: int) -> tuple[PlacedPair, ...]:
    """An activation and a weight pair for each of ``count`` convolutions."""
    pairs = []
    for index in range(count):
        node = f"fire{index}/conv"
        activation = Site(tensor=f"fire{index}/x", consumers=(Consumer(node, 0),), format="uint8")
        weight = Site(
            tensor=f"fire{index}/w", consumers=(Consumer(node, 1),), format="int8", axis=0, weight=True
        )
        pairs.append(PlacedPair(site=activation, scale=(0.0235 + index / 1000,), zero_point=(0,)))
        pairs.append(PlacedPair(site=weight, scale=(0.0021, 0.0034, 0.0019), zero_point=(0, 0, 0)))
    return tuple(pairs)


def _interval(ratio: float, *, same: bool = False) -> Interval:
    if same:
        return Interval(median=1.0, low=1.0, high=1.0)
    return Interval(median=round(ratio, 4), low=round(ratio * 0.982, 4), high=round(ratio * 1.017, 4))


def sample_parity(*outputs: tuple[str, float]) -> ParityEvidence:
    """Parity with three quarters of the noise from quantization, the rest from the runtime."""
    return ParityEvidence(
        outputs=tuple(sample_tensor(name, db) for name, db in outputs),
        samples=32,
        data="evaluation",
        quantization=tuple(sample_tensor(name, db + 1.25) for name, db in outputs),
        runtime=tuple(sample_tensor(name, db + 6.02) for name, db in outputs),
    )


def sample_tensor(name: str, sqnr_db: float) -> TensorParity:
    """An output with this SQNR, and other figures that are consistent with it."""
    noise: float = 0.0 if sqnr_db == float("inf") else 10 ** (-sqnr_db / 20)
    return TensorParity(
        name=name,
        sqnr_db=sqnr_db,
        cosine=1 - noise**2 / 2,
        max_abs=round(noise, 5),
        max_steps=round(noise * 90, 2),
        agreement={"top1": 1.0, "top5": 0.96},
    )


def _trial(number: int, ratio: float | None, best: float, *, faster: bool) -> Trial:
    phase = "pure" if number < 4 else "compose"
    blank = Trial(number=number, phase=phase, placement=NO_PAIRS, build_seconds=0.4)
    if ratio is None:
        return replace(blank, status="failed", error="Attempt to replace the existing tensor")
    gained = round(ratio / best, 4)
    race = Race(
        opponent=f"trial {number - 1}",
        ratio=gained,
        p_value=0.001 if faster else 0.4,
        pairs=24,
        verdict="faster" if faster else "slower" if ratio > best * 1.05 else "no difference",
        interval=Interval(median=gained, low=round(gained * 0.99, 4), high=round(gained * 1.01, 4)),
    )
    return replace(blank, ratio=ratio, incumbent=faster, race=race if number else None)


FOLDER = Path("/specs")
STARTED = "2026-01-15T09:30:00Z"
DEVICE = DeviceKey(
    key=f"x86-64 avx512-vnni {DEFAULT_BACKEND}-1.31",
    details={"cpu": "Sample CPU 3.1 GHz", "threads": "1", DEFAULT_BACKEND: "1.31.1"},
)


def sample_run() -> RunRecord:
    """Three cases: a speed-up with one failing check, an unchanged model, and one from the cache with accuracy."""
    cases = (faster_case(), alone_case(), cached_case())
    return RunRecord(version="0.1.0", started=STARTED, seconds=754.2, cases=cases)


def empty_run() -> RunRecord:
    """A run in which no case was judged."""
    return RunRecord(version="0.1.0", started=STARTED, seconds=0.0, cases=())


def bare_run() -> RunRecord:
    """A case without measurements, so that all its checks are inconclusive."""
    case = _judged_case("bare", "", {"latency": {"max_ms": 3}, "parity": {"min_cosine": 0.99}}, node_ops={})
    return RunRecord(version="0.1.0", started=STARTED, seconds=1.0, cases=(case,))


# Markup of terminals, HTML, Markdown tables and spreadsheets, and right-to-left text.
HOSTILE = "=x|y</td><script>alert(1)</script>\n# \x1b[31m`*_[a](b)\u202e\r&amp;"


def hostile_run() -> RunRecord:
    """The sample's first case with names and messages of a hostile model or runtime."""
    record = faster_case()
    found = record.evidence
    assert found.search is not None
    readers = (Consumer(HOSTILE, 0),)
    pairs = tuple(
        replace(pair, site=replace(pair.site, tensor=HOSTILE + pair.site.tensor, consumers=readers))
        for pair in found.pairs
    )
    winner = Placement(sites=frozenset(pair.site for pair in pairs))
    evidence = replace(
        found,
        case=replace(found.case, title=HOSTILE, id="hostile", tags=(HOSTILE,)),
        target=HOSTILE,
        device=DeviceKey(key=HOSTILE, details={HOSTILE: HOSTILE}),
        pairs=pairs,
        node_ops={HOSTILE: HOSTILE, **found.node_ops},
        parity=ParityEvidence(outputs=(sample_tensor(HOSTILE, 12.0),), samples=1, data=HOSTILE),
        accuracy={HOSTILE: AccuracyEvidence(metric=HOSTILE, reference=0.9, tuned=0.8, samples=10)},
        quantized=QuantizedWork(nodes=(HOSTILE,), runs=True),
        search=replace(
            found.search,
            winner=winner,
            reason=HOSTILE,
            unchanged=True,
            strategy=HOSTILE,
            rejected=tuple(replace(one, role=HOSTILE, reason=HOSTILE) for one in sample_rejected()),
        ),
        warnings=(HOSTILE,),
    )
    results = tuple(
        replace(result, id=HOSTILE, verdict=replace(result.verdict, headline=HOSTILE, advice=HOSTILE))
        for result in record.results
    )
    cases = (CaseRecord(evidence=evidence, results=results),)
    return RunRecord(version=HOSTILE, started=HOSTILE, seconds=1.0, cases=cases)


def faster_case() -> CaseRecord:
    """SqueezeNet, 1.74 times as fast; its latency budget is exceeded and all other checks pass."""
    pairs = sample_pairs(12)
    return _judged_case(
        "squeezenet",
        "SqueezeNet for the door camera",
        {
            "latency": {"max_ms": {f"{DEFAULT_BACKEND}-cpu": 4.5}},
            "speedup": {"min": 1.3},
            "parity": {"min_sqnr_db": 20, "min_cosine": 0.999},
            "placement": {"require": ["Conv"], "forbid": ["Softmax"], "max_pairs": 40},
            "regression": {"max": 0.05},
        },
        pairs=pairs,
        quantized=QuantizedWork(nodes=tuple(f"fire{index}/conv" for index in range(11)), runs=True),
        search=sample_search(pairs, (1.0, 0.66, 0.93, 0.81, 0.575, None, 0.60, 0.574)),
        latency=sample_latency({"reference": 8.31, "tuned": 4.77, "everything": 5.48, "runner-up": 4.81}),
        parity=sample_parity(("softmaxout_1", 31.4)),
        regression=sample_regression(0.004),
        size_bytes={"reference": 4_956_208, "tuned": 1_286_144},
    )


def alone_case() -> CaseRecord:
    """A face detector without a candidate that was significantly faster than the reference."""
    return _judged_case(
        "ultraface",
        "Face detector",
        {"speedup": {"min": 1.0}, "parity": {"min_sqnr_db": 40}},
        search=replace(
            sample_search((), (1.0, 1.31, 1.12, 1.04, 1.02, 1.01), unchanged=True), rejected=sample_rejected()
        ),
        latency=sample_latency({"reference": 4.12, "tuned": 4.12, "everything": 5.38}),
        parity=sample_parity(("scores", float("inf")), ("boxes", float("inf"))),
        size_bytes={"reference": 1_270_727, "tuned": 1_270_727},
        warnings=("Calibration used random inputs: parity proves little. Give inputs.calibration.",),
    )


def cached_case() -> CaseRecord:
    """A small classifier with a cached result, and its accuracy on labelled data."""
    cached = Provenance(source="cached", age_seconds=7400.0)
    pairs = sample_pairs(9)
    # 354 of 360 samples right before, 353 after: two became wrong, and one right
    before, after, samples = 354 / 360, 353 / 360, 360
    accuracy = AccuracyEvidence(
        metric="top1", reference=before, tuned=after, samples=samples, lost=2, gained=1
    )
    bound = AccuracyBound(
        metric="top1",
        least=before - 0.01,
        reference=before,
        selected=after,
        best=after,
        scored=3,
        samples=samples,
    )
    return _judged_case(
        "digits",
        "",
        {
            "speedup": {"min": 1.1},
            "accuracy": {"metric": "top1", "min": 0.97, "max_drop": 0.01},
            "size": {"max_ratio": 0.5},
        },
        pairs=pairs,
        quantized=QuantizedWork(nodes=tuple(f"fire{index}/conv" for index in range(9)), runs=False),
        search=replace(
            sample_front(sample_search(pairs, (1.0, 0.71, 0.64, 0.95, 0.64))),
            provenance=cached,
            accuracy=bound,
        ),
        latency=replace(
            sample_latency({"reference": 0.0663, "tuned": 0.0421, "everything": 0.0458}), provenance=cached
        ),
        parity=sample_parity(("logits", 28.2)),
        accuracy={"top1": accuracy},
        size_bytes={"reference": 311_296, "tuned": 86_016},
    )


def check_named(kind: str) -> Check:
    """The check of that kind."""
    check: Check = resolve("check", kind)  # type: ignore[assignment]  # the registry cannot know the seam
    return check


def params_of(kind: str, **values: object) -> CheckParams:
    """Parameters of a check, validated as in a spec."""
    return check_named(kind).Params.model_validate({"kind": kind, **values})


def _judged_case(
    name: str, title: str, checks: Mapping[str, Mapping[str, object]], **measured: object
) -> CaseRecord:
    """The record of a model with this evidence, judged by the real checks; ``checks`` has their parameters."""
    specs = tuple(
        CheckSpec(id=kind, kind=kind, params=params_of(kind, **checks[kind]), line=line)
        for line, kind in enumerate(checks, 20)
    )
    model, spec = FOLDER / "models" / f"{name}.onnx", FOLDER / f"{name}.qdq.yaml"
    case = Case(id="default", title=title, model=model, spec=spec, checks=specs)
    ops = {f"fire{index}/{op.lower()}": op for op in ("Conv", "Relu") for index in range(26)}
    facts: dict[str, object] = {
        "backend": DEFAULT_BACKEND,
        "target": f"{DEFAULT_BACKEND}-cpu",
        "device": DEVICE,
        "model_sha256": "3f" * 32,
        "node_ops": ops | {"pool10": "GlobalAveragePool", "softmax": "Softmax"},
        **measured,
    }
    evidence = Evidence(case=case, **facts)  # type: ignore[arg-type]  # keywords are checked where they are given
    results = tuple(
        CheckResult(id=one.id, kind=one.kind, severity=one.severity, verdict=judge(one.params, evidence))
        for one, judge in ((one, check_named(one.kind).judge) for one in specs)
    )
    return CaseRecord(evidence=evidence, results=results)
