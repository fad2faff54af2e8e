"""Sample records: a run in the form that reports take, made without measuring anything.

The numbers are invented but plausible, and the same on each machine. The verdicts are those of the real
checks. ``sample_run()`` contains a model that became faster, one that is unchanged and one with accuracy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qdqspec.checks.base import Check, CheckParams
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.registry import resolve
from qdqspec.testing.samples import (
    sample_accuracy,
    sample_bound,
    sample_front,
    sample_latency,
    sample_pairs,
    sample_parity,
    sample_regression,
    sample_search,
    sample_tensor,
)
from qdqspec.types import (
    AccuracyEvidence,
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    Consumer,
    DeviceKey,
    Evidence,
    ParityEvidence,
    Placement,
    Provenance,
    RunRecord,
    Site,
)

FOLDER = Path("/specs")
STARTED = "2026-01-15T09:30:00Z"
DEVICE = DeviceKey(
    key=f"x86-64 avx512-vnni {DEFAULT_BACKEND}-1.31",
    details={"cpu": "Sample CPU 3.1 GHz", "threads": "1", DEFAULT_BACKEND: "1.31.1"},
)


def sample_run() -> RunRecord:
    """Three cases: a speed-up with one failing check, an unchanged model, and one from the cache with accuracy."""
    return RunRecord(
        version="0.1.0", started=STARTED, seconds=754.2, cases=(faster_case(), alone_case(), cached_case())
    )


def empty_run() -> RunRecord:
    """A run in which no case was judged."""
    return RunRecord(version="0.1.0", started=STARTED, seconds=0.0, cases=())


def bare_run() -> RunRecord:
    """A case without measurements, so that all its checks are inconclusive."""
    case = _case("bare", "", ("latency", {"max_ms": 3}), ("parity", {"min_cosine": 0.99}))
    return RunRecord(
        version="0.1.0", started=STARTED, seconds=1.0, cases=(judged(_evidence(case, node_ops={})),)
    )


# Markup of terminals, HTML, Markdown tables and spreadsheets, and right-to-left text.
HOSTILE = "=x|y</td><script>alert(1)</script>\n# \x1b[31m`*_[a](b)\u202e\r&amp;"


def hostile_run() -> RunRecord:
    """The sample's first case with names and messages of a hostile model or runtime."""
    record = faster_case()
    found = record.evidence
    assert found.search is not None
    pairs = tuple(replace(pair, site=_renamed(pair.site)) for pair in found.pairs)
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
        search=replace(found.search, winner=winner, reason=HOSTILE, unchanged=True, strategy=HOSTILE),
        warnings=(HOSTILE,),
    )
    results = tuple(
        replace(result, id=HOSTILE, verdict=replace(result.verdict, headline=HOSTILE, advice=HOSTILE))
        for result in record.results
    )
    return RunRecord(
        version=HOSTILE, started=HOSTILE, seconds=1.0, cases=(CaseRecord(evidence=evidence, results=results),)
    )


def _renamed(site: Site) -> Site:
    return replace(site, tensor=HOSTILE + site.tensor, consumers=(Consumer(HOSTILE, 0),))


def faster_case() -> CaseRecord:
    """SqueezeNet, 1.74 times as fast; its latency budget is exceeded and all other checks pass."""
    case = _case(
        "squeezenet",
        "SqueezeNet for the door camera",
        ("latency", {"max_ms": {f"{DEFAULT_BACKEND}-cpu": 4.5}}),
        ("speedup", {"min": 1.3}),
        ("parity", {"min_sqnr_db": 20, "min_cosine": 0.999}),
        ("placement", {"require": ["Conv"], "forbid": ["Softmax"], "max_pairs": 40}),
        ("regression", {"max": 0.05}),
    )
    pairs = sample_pairs(12, whole=26)
    evidence = _evidence(
        case,
        pairs=pairs,
        search=sample_search(pairs, (1.0, 0.66, 0.93, 0.81, 0.575, None, 0.60, 0.574)),
        latency=sample_latency({"reference": 8.31, "tuned": 4.77, "everything": 5.48, "runner-up": 4.81}),
        parity=sample_parity(("softmaxout_1", 31.4)),
        regression=sample_regression(0.004),
        size_bytes={"reference": 4_956_208, "tuned": 1_286_144},
    )
    return judged(evidence)


def alone_case() -> CaseRecord:
    """A face detector without a candidate that was significantly faster than the reference."""
    case = _case("ultraface", "Face detector", ("speedup", {"min": 1.0}), ("parity", {"min_sqnr_db": 40}))
    evidence = _evidence(
        case,
        search=sample_search((), (1.0, 1.31, 1.12, 1.04, 1.02, 1.01), unchanged=True),
        latency=sample_latency({"reference": 4.12, "tuned": 4.12, "everything": 5.38}),
        parity=sample_parity(("scores", float("inf")), ("boxes", float("inf"))),
        size_bytes={"reference": 1_270_727, "tuned": 1_270_727},
        warnings=("Calibration used random inputs: parity proves little. Give inputs.calibration.",),
    )
    return judged(evidence)


def cached_case() -> CaseRecord:
    """A small classifier with a cached result, and its accuracy on labelled data."""
    case = _case(
        "digits",
        "",
        ("speedup", {"min": 1.1}),
        ("accuracy", {"metric": "top1", "min": 0.97, "max_drop": 0.01}),
        ("size", {"max_ratio": 0.5}),
    )
    cached = Provenance(source="cached", age_seconds=7400)
    pairs = sample_pairs(9, whole=9)
    evidence = _evidence(
        case,
        pairs=pairs,
        search=replace(
            sample_front(sample_search(pairs, (1.0, 0.71, 0.64, 0.95, 0.64))),
            provenance=cached,
            accuracy=sample_bound(),
        ),
        latency=replace(
            sample_latency({"reference": 0.0663, "tuned": 0.0421, "everything": 0.0458}), provenance=cached
        ),
        parity=sample_parity(("logits", 28.2)),
        accuracy={"top1": sample_accuracy()},
        size_bytes={"reference": 311_296, "tuned": 86_016},
    )
    return judged(evidence)


def judged(evidence: Evidence) -> CaseRecord:
    """The record of a case: each check of its spec, judged by the real checks."""
    results = []
    for asked in evidence.case.checks:
        verdict = check_named(asked.kind).judge(asked.params, evidence)
        results.append(CheckResult(id=asked.id, kind=asked.kind, severity=asked.severity, verdict=verdict))
    return CaseRecord(evidence=evidence, results=tuple(results))


def check_named(kind: str) -> Check:
    """The check of that kind."""
    check: Check = resolve("check", kind)  # type: ignore[assignment]  # the registry cannot know the seam
    return check


def params_of(kind: str, **values: object) -> CheckParams:
    """Parameters of a check, validated like those of a spec."""
    return check_named(kind).Params.model_validate({"kind": kind, **values})


def _case(name: str, title: str, *checks: tuple[str, dict[str, object]]) -> Case:
    specs = tuple(
        CheckSpec(id=kind, kind=kind, params=params_of(kind, **values), line=20 + index)
        for index, (kind, values) in enumerate(checks)
    )
    return Case(
        id="default",
        title=title,
        model=FOLDER / "models" / f"{name}.onnx",
        spec=FOLDER / f"{name}.qdq.yaml",
        checks=specs,
    )


def _evidence(case: Case, **measured: object) -> Evidence:
    ops = {f"fire{index}/conv": "Conv" for index in range(26)} | {
        f"fire{index}/relu": "Relu" for index in range(26)
    }
    facts: dict[str, object] = {
        "backend": DEFAULT_BACKEND,
        "target": f"{DEFAULT_BACKEND}-cpu",
        "device": DEVICE,
        "model_sha256": "3f" * 32,
        "node_ops": ops | {"pool10": "GlobalAveragePool", "softmax": "Softmax"},
        **measured,
    }
    return Evidence(case=case, **facts)  # type: ignore[arg-type]  # keywords are checked where they are given
