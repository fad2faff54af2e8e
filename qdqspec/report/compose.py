"""Converts a case record to its written form."""

from __future__ import annotations

from dataclasses import replace

from qdqspec.report.layout import (
    SCHEMA_VERSION,
    CasePart,
    CheckPart,
    CountPart,
    LatencyPart,
    ModelPart,
    OtherPart,
    PairPart,
    ParityPart,
    SchemePart,
    SearchPart,
    SpeedupPart,
    TimedPart,
    TrialPart,
    TrialsPart,
)
from qdqspec.report.private import Redactor, model_path, spec_path
from qdqspec.types import (
    CaseRecord,
    CheckResult,
    Evidence,
    LatencyEvidence,
    ParityEvidence,
    PlacedPair,
    Provenance,
    RunRecord,
    RuntimeComparison,
    SearchResult,
    Trial,
)

_MAIN_ROLES = ("reference", "tuned")


def part_from_case(record: CaseRecord) -> CasePart:
    """All fields of a case that are written, without data private to this machine."""
    found = record.evidence
    redact = Redactor(found)
    search, latency = found.search, found.latency
    return CasePart(
        schema_version=SCHEMA_VERSION,
        case=found.case.name,
        status=found.status,
        reason=redact.text(found.reason),
        id=found.case.id,
        spec=spec_path(found.case),
        title=found.case.title,
        tags=found.case.tags,
        matrix=found.case.matrix,
        backend=found.backend,
        target=found.target,
        device=redact.device(found.device),
        model=ModelPart(sha256=found.model_sha256, path=model_path(found.case)),
        scheme=None if search is None else SchemePart(digest=search.winner.digest),
        reference=None if latency is None else _timed(latency, "reference"),
        tuned=None if latency is None else _timed(latency, "tuned"),
        others=() if latency is None else _others(latency),
        speedup=None if latency is None else _speedup(latency),
        latency=None if latency is None else _latency(latency),
        trials=None if search is None else _trials(search, redact),
        search=None if search is None else _search(search, redact),
        regions=None if search is None else CountPart(count=search.regions),
        patterns=None if search is None else CountPart(count=search.patterns),
        placement=tuple(_pair(pair) for pair in _pairs(found)),
        parity=_parity(found, redact),
        accuracy=found.accuracy,
        regression={name: redact.regression(seen) for name, seen in found.regression.items()},
        figures=found.figures,
        size_bytes=found.size_bytes,
        ops=_ops(found),
        graph=found.graph,
        checks=tuple(_check(result, redact) for result in record.results),
        warnings=tuple(redact.text(warning) for warning in found.warnings),
        provenance=_provenance(found),
    )


def redacted_runtimes(record: RunRecord) -> tuple[RuntimeComparison, ...]:
    """The comparisons of runtimes, without data private to this machine in their failures."""
    redactors = {case.evidence.case.name: Redactor(case.evidence) for case in record.cases}
    return tuple(
        replace(
            found,
            models=tuple(
                replace(model, failure=redactors[model.case].text(model.failure))
                if model.failure and model.case in redactors
                else model
                for model in found.models
            ),
        )
        for found in record.runtimes
    )


def _timed(latency: LatencyEvidence, role: str) -> TimedPart | None:
    if role not in latency.samples:
        return None
    return TimedPart(median_ms=latency.median_ms(role), samples=latency.samples[role])


def _others(latency: LatencyEvidence) -> tuple[OtherPart, ...]:
    return tuple(
        OtherPart(role=role, median_ms=latency.median_ms(role), samples=samples)
        for role, samples in latency.samples.items()
        if role not in _MAIN_ROLES
    )


def _speedup(latency: LatencyEvidence) -> SpeedupPart:
    speedup = latency.speedup
    return SpeedupPart(median=speedup.median, ci95=(speedup.low, speedup.high))


def _latency(latency: LatencyEvidence) -> LatencyPart:
    return LatencyPart(
        clock=latency.clock,
        builds=latency.builds,
        drift=latency.drift,
        ratios=latency.ratios,
        profiles=latency.profiles,
        provenance=latency.provenance,
    )


def _trials(search: SearchResult, redact: Redactor) -> TrialsPart:
    return TrialsPart(
        total=search.total,
        built=search.built,
        failed=search.failed,
        list=tuple(_trial(trial, redact) for trial in search.trials),
    )


def _trial(trial: Trial, redact: Redactor) -> TrialPart:
    return TrialPart(
        number=trial.number,
        phase=trial.phase,
        status=trial.status,
        error=None if trial.error is None else redact.text(trial.error),
        build_seconds=trial.build_seconds,
        ratio=trial.ratio,
        sqnr_db=trial.sqnr_db,
        accuracy=trial.accuracy,
        incumbent=trial.incumbent,
        race=trial.race,
    )


def _search(search: SearchResult, redact: Redactor) -> SearchPart:
    return SearchPart(
        strategy=search.strategy,
        seconds=search.seconds,
        cpu_seconds=search.cpu_seconds,
        float_runs=search.float_runs,
        eps=search.eps,
        blocks=search.blocks,
        unchanged=search.unchanged,
        reason=redact.text(search.reason),
        limits=search.limits,
        corrections=search.corrections,
        front=search.front,
        accuracy=search.accuracy,
        errors=search.errors,
        errors_missing=redact.text(search.errors_missing),
        provenance=search.provenance,
    )


def _pairs(found: Evidence) -> tuple[PlacedPair, ...]:
    """The pairs of the selected model; without their scales if those were not requested."""
    if found.pairs or found.search is None:
        return found.pairs
    sites = sorted(found.search.winner.sites, key=lambda site: (site.tensor, site.consumers))
    return tuple(PlacedPair(site=site, scale=(), zero_point=()) for site in sites)


def _pair(pair: PlacedPair) -> PairPart:
    site = pair.site
    return PairPart(
        tensor=site.tensor,
        consumers=site.consumers,
        format=site.format,
        axis=site.axis,
        weight=site.weight,
        scale=pair.scale,
        zero_point=pair.zero_point,
    )


def _parity(found: Evidence, redact: Redactor) -> ParityPart | None:
    parity = found.parity
    return (
        None if parity is None else part_from_parity(replace(parity, undivided=redact.text(parity.undivided)))
    )


def part_from_parity(parity: ParityEvidence) -> ParityPart:
    """The written form of a parity comparison."""
    return ParityPart(
        sqnr_db=parity.sqnr_db,
        cosine=parity.cosine,
        max_abs=parity.max_abs,
        max_steps=parity.max_steps,
        samples=parity.samples,
        data=parity.data,
        outputs=parity.outputs,
        quantization=parity.quantization,
        runtime=parity.runtime,
        undivided=parity.undivided,
    )


def _ops(found: Evidence) -> dict[str, tuple[str, ...]]:
    ops: dict[str, tuple[str, ...]] = {}
    for node, op_type in found.node_ops.items():
        ops[op_type] = (*ops.get(op_type, ()), node)
    return ops


def _check(result: CheckResult, redact: Redactor) -> CheckPart:
    verdict = redact.verdict(result.verdict)
    return CheckPart(
        id=result.id,
        kind=result.kind,
        severity=result.severity,
        verdict=verdict.outcome,
        headline=verdict.headline,
        numbers=verdict.numbers,
        sections=verdict.sections,
        advice=verdict.advice,
    )


def _provenance(found: Evidence) -> Provenance:
    """Provenance of the times; if none were taken, of the search's result."""
    if found.latency is not None:
        return found.latency.provenance
    return found.search.provenance if found.search is not None else Provenance()
