"""Converts a case record to its written form and back.

A record and its part have most fields in common: these are copied by name, the others are written out here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qdqspec.codec import record_of
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
from qdqspec.report.names import Redactor, model_path, spec_path
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckResult,
    Evidence,
    Interval,
    LatencyEvidence,
    ParityEvidence,
    PlacedPair,
    Placement,
    Provenance,
    RunRecord,
    RuntimeComparison,
    SearchResult,
    Site,
    Trial,
    Verdict,
)

_NOWHERE = Placement(sites=frozenset())  # a record does not hold the placements of trials


# ---- to the written form ------------------------------------------------------------------------


def part_from_case(record: CaseRecord) -> CasePart:
    """All fields of a case that are written, without data private to this machine."""
    found = record.evidence
    redact = Redactor(found)
    search, latency, parity = found.search, found.latency, found.parity
    timed = _timed(latency)
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
        reference=timed.pop("reference", None),
        tuned=timed.pop("tuned", None),
        others=tuple(OtherPart(role=role, **dict(part)) for role, part in timed.items()),
        speedup=None if latency is None else _speedup(latency.speedup),
        latency=None if latency is None else LatencyPart.model_validate(latency),
        trials=None if search is None else _trials(search, redact),
        search=None if search is None else _search(search, redact),
        regions=None if search is None else CountPart(count=search.regions),
        patterns=None if search is None else CountPart(count=search.patterns),
        placement=tuple(_pair(pair) for pair in _pairs(found)),
        parity=None
        if parity is None
        else part_from_parity(replace(parity, undivided=redact.text(parity.undivided))),
        accuracy=found.accuracy,
        regression={name: redact.regression(seen) for name, seen in found.regression.items()},
        figures=found.figures,
        size_bytes=found.size_bytes,
        profiles=found.profiles,
        ops=_ops(found),
        graph=found.graph,
        checks=tuple(_check(result, redact) for result in record.results),
        warnings=tuple(redact.text(warning) for warning in found.warnings),
        provenance=_provenance(found),
    )


def part_from_parity(parity: ParityEvidence) -> ParityPart:
    """The written form of a parity comparison."""
    return ParityPart.model_validate(parity)


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


def _timed(latency: LatencyEvidence | None) -> dict[str, TimedPart]:
    """Median and samples by role."""
    if latency is None:
        return {}
    return {
        role: TimedPart(median_ms=latency.median_ms(role), samples=samples)
        for role, samples in latency.samples.items()
    }


def _speedup(speedup: Interval) -> SpeedupPart:
    return SpeedupPart(median=speedup.median, ci95=(speedup.low, speedup.high))


def _trials(search: SearchResult, redact: Redactor) -> TrialsPart:
    trials = (
        trial if trial.error is None else replace(trial, error=redact.text(trial.error))
        for trial in search.trials
    )
    parts = tuple(TrialPart.model_validate(trial) for trial in trials)
    return TrialsPart(total=search.total, built=search.built, failed=search.failed, list=parts)


def _search(search: SearchResult, redact: Redactor) -> SearchPart:
    reason, missing = redact.text(search.reason), redact.text(search.errors_missing)
    return SearchPart.model_validate(replace(search, reason=reason, errors_missing=missing))


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


# ---- from the written form ----------------------------------------------------------------------


def case_from_part(part: CasePart) -> CaseRecord:
    """The case record. Raises ``ValueError`` if its parts contradict each other."""
    spec = Path(part.spec) if part.spec is not None else None
    model = Path(part.model.path) if spec is None else spec.parent / part.model.path
    pairs = tuple(record_of(PlacedPair, pair, site=record_of(Site, pair)) for pair in part.placement)
    evidence = record_of(
        Evidence,
        part,
        case=Case(id=part.id, model=model, spec=spec, title=part.title, tags=part.tags, matrix=part.matrix),
        model_sha256=part.model.sha256,
        search=_search_result(part, pairs),
        pairs=pairs,
        latency=_latency_evidence(part),
        parity=None if part.parity is None else record_of(ParityEvidence, part.parity),
        node_ops={node: op_type for op_type, nodes in part.ops.items() for node in nodes},
        skipped=part.reason if part.status == "skipped" else "",
    )
    results = tuple(
        record_of(CheckResult, check, verdict=record_of(Verdict, check, outcome=check.verdict))
        for check in part.checks
    )
    return CaseRecord(evidence=evidence, results=results)


def _search_result(part: CasePart, pairs: tuple[PlacedPair, ...]) -> SearchResult | None:
    if part.search is None or part.trials is None:
        return None
    return record_of(
        SearchResult,
        part.search,
        winner=Placement(sites=frozenset(pair.site for pair in pairs)),
        trials=tuple(record_of(Trial, trial, placement=_NOWHERE) for trial in part.trials.list),
        regions=part.regions.count if part.regions else 0,
        patterns=part.patterns.count if part.patterns else 0,
    )


def _latency_evidence(part: CasePart) -> LatencyEvidence | None:
    if part.latency is None or part.speedup is None:
        return None
    roles = {"reference": part.reference, "tuned": part.tuned, **{other.role: other for other in part.others}}
    samples = {role: timed.samples for role, timed in roles.items() if timed is not None}
    empty = [role for role, taken in samples.items() if not taken.on(part.latency.clock)]
    if empty:
        raise ValueError(f"{empty[0]} has no samples")
    count = len(part.latency.profiles)
    unlike = [role for role, taken in samples.items() if len(taken.profiles) != count]
    if unlike:
        raise ValueError(
            f"{unlike[0]} has samples of {len(samples[unlike[0]].profiles)} profiles, not {count}"
        )
    low, high = part.speedup.ci95
    speedup = Interval(median=part.speedup.median, low=low, high=high)
    return record_of(LatencyEvidence, part.latency, samples=samples, speedup=speedup)
