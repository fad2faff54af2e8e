"""Converts records to JSON and back.

``record_from_json(record_to_json(record))`` keeps all that reports show, and a second round trip changes
nothing. Trial placements, check parameters and layer times, which only the journal and the spec hold, are not
in a record. A record and its part have most fields in common, which are copied by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from qdqspec.codec import record_of
from qdqspec.errors import StateError
from qdqspec.files import RESULT
from qdqspec.plain_json import read_json
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
    RunPart,
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

_MOST_BYTES = 256 << 20  # a record of a thousand cases has a tenth of it
_AGAIN = "name a file that `pytest --qdq-json` or `tune --report run.json` wrote, or run the specs again"
_AnyPart = TypeVar("_AnyPart", RunPart, CasePart)


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """The run record as strict JSON data, without NaN or Infinity."""
    part = RunPart(
        schema_version=SCHEMA_VERSION,
        qdqspec=record.version,
        started=record.started,
        seconds=record.seconds,
        cases=tuple(_part_from_case(case) for case in record.cases),
        runtimes=_redacted_runtimes(record),
        common=record.common,
    )
    return _data(part)


def case_to_json(record: CaseRecord) -> dict[str, Any]:
    """One case as strict JSON data: the content of ``result.json``, and an entry of the run record."""
    return _data(_part_from_case(record))


def parity_to_json(parity: ParityEvidence) -> dict[str, Any]:
    """A comparison of outputs as strict JSON data, as in ``result.json``."""
    return _data(ParityPart.model_validate(parity))


def record_from_json(data: object) -> RunRecord:
    """The run record of JSON data. Raises `StateError` if the data is damaged or not a run record."""
    part = _part(RunPart, data, "run record")
    with _damage("run record"):
        cases = tuple(_case_from_part(case) for case in part.cases)
    return RunRecord(
        version=part.qdqspec,
        started=part.started,
        seconds=part.seconds,
        cases=cases,
        runtimes=part.runtimes,
        common=part.common,
    )


def case_from_json(data: object) -> CaseRecord:
    """The case of a ``result.json``. Raises `StateError` if the data is damaged or not a case record."""
    part = _part(CasePart, data, "case record")
    with _damage("case record"):
        return _case_from_part(part)


def read_record(path: Path) -> RunRecord:
    """The run record in a file. Raises `StateError` naming the file if it cannot be read."""
    with _named(path, "the run record", "check the path", _AGAIN):
        return record_from_json(read_json(path, most_bytes=_MOST_BYTES))


def read_case(folder: Path) -> CaseRecord:
    """The result in the folder of a case. Raises `StateError` naming the file if it cannot be read."""
    path = folder / RESULT
    with _named(
        path, "the result", "name the folder of a case, which has its tuned.onnx", "run the case again"
    ):
        return case_from_json(read_json(path, most_bytes=_MOST_BYTES))


@contextmanager
def _named(path: Path, what: str, absent: str, damaged: str) -> Iterator[None]:
    """Errors name the file, and what to do if it is absent or damaged."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{what} cannot be read: {error.strerror}", where=path, cure=absent) from None
    except ValueError as error:
        raise StateError(f"this is not a JSON file: {error}", where=path, cure=damaged) from None
    except StateError as error:
        raise StateError(error.what, where=path, cure=damaged) from None


def json_text(data: dict[str, Any]) -> str:
    """The data as a file's text: two spaces, sorted keys, strict JSON, a newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _data(part: RunPart | CasePart | ParityPart) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(part.model_dump_json())
    return data


def _part(layout: type[_AnyPart], data: object, name: str) -> _AnyPart:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        said = f"schema_version {version}" if isinstance(version, int) else "no schema_version"
        raise StateError(f"this is no {name} of schema_version {SCHEMA_VERSION}: it has {said}", cure=_AGAIN)
    if layout is RunPart and isinstance(data, dict) and "case" in data:
        raise StateError("this is the result of one case, not a run record", cure=_AGAIN)
    with _damage(name):
        return layout.model_validate(data)


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise the first validation error as a `StateError`."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        raise StateError(f"the {name} is damaged: {where}: {problem['msg']}", cure=_AGAIN) from None
    except ValueError as error:
        raise StateError(f"the {name} is damaged: {error}", cure=_AGAIN) from None


def _part_from_case(record: CaseRecord) -> CasePart:
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
        placement=tuple(
            PairPart.model_validate({**asdict(pair.site), "scale": pair.scale, "zero_point": pair.zero_point})
            for pair in _pairs(found)
        ),
        parity=None
        if parity is None
        else ParityPart.model_validate(replace(parity, undivided=redact.text(parity.undivided))),
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


def _redacted_runtimes(record: RunRecord) -> tuple[RuntimeComparison, ...]:
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


def _case_from_part(part: CasePart) -> CaseRecord:
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
        trials=tuple(
            record_of(Trial, trial, placement=Placement.of_digest(trial.placement))
            for trial in part.trials.list
        ),
        regions=part.regions.count if part.regions else 0,
        patterns=part.patterns.count if part.patterns else 0,
    )


def _latency_evidence(part: CasePart) -> LatencyEvidence | None:
    if part.latency is None or part.speedup is None:
        return None
    roles = {"reference": part.reference, "tuned": part.tuned, **{other.role: other for other in part.others}}
    samples = {role: timed.samples for role, timed in roles.items() if timed is not None}
    low, high = part.speedup.ci95
    speedup = Interval(median=part.speedup.median, low=low, high=high)
    found = record_of(LatencyEvidence, part.latency, samples=samples, speedup=speedup)
    for role, taken in samples.items():
        if not taken.on(found.clock):
            raise ValueError(f"{role} has no samples")
        if len(taken.profiles) != len(found.profiles):
            count = len(taken.profiles)
            raise ValueError(f"{role} has samples of {count} profiles, not {len(found.profiles)}")
    return found
