"""Converts a written case back to its record."""

from __future__ import annotations

from pathlib import Path

from qdqspec.report.layout import CasePart, CheckPart, PairPart, TrialPart
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
    SearchResult,
    Site,
    Trial,
    Verdict,
)

_NOWHERE = Placement(sites=frozenset())  # a record does not hold the placements of trials


def case_from_part(part: CasePart) -> CaseRecord:
    """The case record. Raises ``ValueError`` if its parts contradict each other."""
    evidence = Evidence(
        case=_case(part),
        backend=part.backend,
        target=part.target,
        device=part.device,
        model_sha256=part.model.sha256,
        search=_search(part),
        pairs=tuple(_pair(pair) for pair in part.placement),
        latency=_latency(part),
        parity=_parity(part),
        accuracy=part.accuracy,
        regression=part.regression,
        figures=part.figures,
        size_bytes=part.size_bytes,
        node_ops={node: op_type for op_type, nodes in part.ops.items() for node in nodes},
        graph=part.graph,
        warnings=part.warnings,
        skipped=part.reason if part.status == "skipped" else "",
    )
    return CaseRecord(evidence=evidence, results=tuple(_check(check) for check in part.checks))


def _case(part: CasePart) -> Case:
    spec = Path(part.spec) if part.spec is not None else None
    return Case(
        id=part.id,
        model=Path(part.model.path) if spec is None else spec.parent / part.model.path,
        spec=spec,
        title=part.title,
        tags=part.tags,
        matrix=part.matrix,
    )


def _search(part: CasePart) -> SearchResult | None:
    search, trials = part.search, part.trials
    if search is None or trials is None:
        return None
    return SearchResult(
        winner=Placement(sites=frozenset(_pair(pair).site for pair in part.placement)),
        trials=tuple(_trial(trial) for trial in trials.list),
        unchanged=search.unchanged,
        reason=search.reason,
        limits=search.limits,
        corrections=search.corrections,
        front=search.front,
        accuracy=search.accuracy,
        errors=search.errors,
        errors_missing=search.errors_missing,
        strategy=search.strategy,
        seconds=search.seconds,
        cpu_seconds=search.cpu_seconds,
        float_runs=search.float_runs,
        eps=search.eps,
        blocks=search.blocks,
        regions=part.regions.count if part.regions else 0,
        patterns=part.patterns.count if part.patterns else 0,
        provenance=search.provenance,
    )


def _trial(part: TrialPart) -> Trial:
    return Trial(
        number=part.number,
        phase=part.phase,
        placement=_NOWHERE,
        status=part.status,
        error=part.error,
        build_seconds=part.build_seconds,
        race=part.race,
        incumbent=part.incumbent,
        ratio=part.ratio,
        sqnr_db=part.sqnr_db,
        accuracy=part.accuracy,
    )


def _pair(part: PairPart) -> PlacedPair:
    site = Site(
        tensor=part.tensor,
        consumers=part.consumers,
        format=part.format,
        axis=part.axis,
        weight=part.weight,
    )
    return PlacedPair(site=site, scale=part.scale, zero_point=part.zero_point)


def _latency(part: CasePart) -> LatencyEvidence | None:
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
    return LatencyEvidence(
        clock=part.latency.clock,
        samples=samples,
        ratios=part.latency.ratios,
        speedup=Interval(median=part.speedup.median, low=part.speedup.ci95[0], high=part.speedup.ci95[1]),
        builds=part.latency.builds,
        drift=part.latency.drift,
        profiles=part.latency.profiles,
        provenance=part.latency.provenance,
    )


def _parity(part: CasePart) -> ParityEvidence | None:
    found = part.parity
    if found is None:
        return None
    return ParityEvidence(
        outputs=found.outputs,
        samples=found.samples,
        data=found.data,
        quantization=found.quantization,
        runtime=found.runtime,
        undivided=found.undivided,
    )


def _check(part: CheckPart) -> CheckResult:
    verdict = Verdict(
        outcome=part.verdict,
        headline=part.headline,
        sections=part.sections,
        numbers=part.numbers,
        advice=part.advice,
    )
    return CheckResult(id=part.id, kind=part.kind, severity=part.severity, verdict=verdict)
