"""Runs one item: skips it if nothing can be judged, else judges its check."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from qdqspec.config import Settings
from qdqspec.errors import ModelError, QdqspecError
from qdqspec.plugin.distribute import note_session
from qdqspec.plugin.options import settings_of
from qdqspec.plugin.progress import shown
from qdqspec.plugin.render import CheckFailed, VerdictWarning, failure_text, reproduction
from qdqspec.types import Case, CheckResult, DataSource, Evidence, Loader, Metric

if TYPE_CHECKING:
    from qdqspec.plugin.collect import CheckItem
    from qdqspec.session import Session


def run_check(
    request: pytest.FixtureRequest,
    qdq_session: Session,
    qdq_backend: str,
    qdq_calibration: DataSource | None,
    qdq_metrics: Mapping[str, Metric],
    qdq_data: Mapping[str, Loader],
) -> None:
    """Judge the check of the requesting item."""
    item: CheckItem = request.node
    qdq_backend = item.case.backend or qdq_backend
    settings = settings_of(item.config)
    note_session(item.config, qdq_session)
    _skip_unless(item.case, qdq_backend, qdq_session)
    inputs = replace(item.case.inputs, calibration=qdq_calibration)
    case = replace(item.case, inputs=inputs, metrics=qdq_metrics, loaders=qdq_data)
    if settings.mode == "plan":
        pytest.skip(f"plan: {qdq_session.plan(replace(case, checks=(item.check,)))}")
    _require_device(case, qdq_session, qdq_backend, settings)
    try:
        case = replace(case, model=_model_path(request, case))
    except QdqspecError as error:
        qdq_session.fail(case, item.check, error)
        raise
    with shown(item.config, qdq_session):
        result = qdq_session.judge(case, item.check)
    evidence = _evidence(qdq_session, case)
    item.user_properties.extend(properties(result, evidence))
    _conclude(item, result, settings, evidence)


def _skip_unless(case: Case, backend: str, session: Session) -> None:
    """Skip if the machine or the run does not meet ``skip_unless`` of the spec."""
    wanted = case.skipping.unless.get("backend")
    if wanted is not None and wanted != backend:
        if not wanted.startswith(f"{backend}-"):
            option = f"--qdq-backend={wanted.partition('-')[0]}"
            pytest.skip(f"for backend {wanted}, and this run uses {backend}; run it with {option}")
        target = session.target(case)
        if wanted != target:
            pytest.skip(f"for target {wanted}, and this run is on {target}")
    wanted = case.skipping.unless.get("compute_capability")
    if wanted is not None and not fulfils(session.availability(case).facts.get("compute_capability"), wanted):
        pytest.skip(f"for a GPU of compute capability {wanted}, which {backend} does not have here")


_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}


def fulfils(value: str | None, comparison: str) -> bool:
    """Whether a version such as ``8.9`` fulfils ``>=8.6``. An unknown one fulfils nothing."""
    sign = next(sign for sign in _COMPARE if comparison.startswith(sign))
    if value is None:
        return False
    wanted = _numbers(comparison.removeprefix(sign))
    return bool(_COMPARE[sign](_numbers(value), wanted))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip().split("."))


def _require_device(case: Case, session: Session, backend: str, settings: Settings) -> None:
    found = session.availability(case)
    if found.usable:
        return
    error = found.error(backend)
    reason = "; ".join(filter(None, (error.what, error.cure)))
    session.skip(case, reason)
    if "device" in settings.require:
        raise CheckFailed(f"{reason}\n\nIt fails because of --qdq-require=device.")
    pytest.skip(reason)


def _model_path(request: pytest.FixtureRequest, case: Case) -> Path:
    """The user's file of the model of fixture ``qdq_model``, which a conftest may have replaced."""
    from qdqspec.graph.given import OwnCopy

    model = request.getfixturevalue("qdq_model")
    while isinstance(model, OwnCopy):  # changes such as fixed inputs are made from the case, once
        model = model.origin
    path: Path | None = model.path
    if path is None:
        raise ModelError(
            "the model that fixture 'qdq_model' gave has no file",
            where=case.name,
            cure="save it, and return qdqspec.graph.model.load_model(path)",
        )
    return path


def _evidence(session: Session, case: Case) -> Evidence | None:
    for record in session.record().cases:
        if (record.evidence.case.spec, record.evidence.case.name) == (case.spec, case.name):
            return record.evidence
    return None


def properties(result: CheckResult, evidence: Evidence | None) -> list[tuple[str, object]]:
    """Properties for junit and other reports, as plain values that pytest-xdist can carry."""
    found: list[tuple[str, object]] = [("qdq.verdict", result.verdict.outcome)]
    if evidence is not None:
        found += [("qdq.backend", evidence.target), ("qdq.device", evidence.device.key)]
        if evidence.search is not None:
            found += [("qdq.scheme", evidence.search.winner.digest), ("qdq.trials", evidence.search.total)]
        if evidence.latency is not None:
            found += [
                ("qdq.latency_ms", evidence.latency.median_ms("tuned")),
                ("qdq.reference_ms", evidence.latency.median_ms("reference")),
                ("qdq.speedup", evidence.latency.speedup.median),
                ("qdq.provenance", str(evidence.latency.provenance)),
            ]
        if evidence.parity is not None:
            found.append(("qdq.sqnr_db", evidence.parity.sqnr_db))
    known = {name for name, _ in found}
    numbers = ((f"qdq.{name}", float(value)) for name, value in result.verdict.numbers.items())
    return found + [(name, value) for name, value in numbers if name not in known]


def _conclude(item: CheckItem, result: CheckResult, settings: Settings, evidence: Evidence | None) -> None:
    verdict = result.verdict
    if verdict.outcome == "pass":
        return
    if verdict.outcome == "inconclusive" and "conclusive" not in settings.require:
        cure = f"; run: {verdict.command}" if verdict.command else ""
        pytest.skip(f"inconclusive: {verdict.headline}{cure}")
    if result.severity == "warn":
        _warn(item, verdict.headline)
        return
    scheme = evidence.search.winner.digest if evidence is not None and evidence.search is not None else None
    _fail(item, result, reproduction(item, settings, scheme), evidence)


def _warn(item: CheckItem, headline: str) -> None:
    try:
        item.warn(VerdictWarning(headline))
    except VerdictWarning:  # where warnings are errors, it is reported as a verdict too
        raise CheckFailed(f"{headline}\n\nA warning by the spec, an error by filterwarnings.") from None


def _fail(item: CheckItem, result: CheckResult, command: str, evidence: Evidence | None) -> NoReturn:
    verdict = result.verdict
    if verdict.outcome == "inconclusive":
        verdict = replace(verdict, headline=f"inconclusive: {verdict.headline}")
    folder = evidence.output if evidence is not None else None
    raise CheckFailed(failure_text(verdict, item.case, item.check, command, folder))
