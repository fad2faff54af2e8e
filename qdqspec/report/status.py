"""The lines below the summary table: accuracy limits, fronts, and why cases are unchanged or skipped."""

from __future__ import annotations

from qdqspec.report.names import distinct_names
from qdqspec.types import EXACT_DB, CaseRecord, RunRecord, SearchLimits, SearchResult
from qdqspec.units import db_text, list_text, plain, ratio_text

_SHOWN = 4  # names of cases listed under one limit
_WIDTH = 44


def status_lines(record: RunRecord) -> list[str]:
    """The SQNR limit, by case if cases differ in it; then lines on cases that are unchanged or skipped, and fronts."""
    names = [plain(name, _WIDTH) for name in distinct_names(record.cases)]
    limits: dict[str, list[str]] = {}
    for name, case in zip(names, record.cases, strict=True):
        if case.evidence.search is not None:
            limits.setdefault(limit_text(case.evidence.search.limits), []).append(name)
    lines = [f"SQNR limit: {_by_case(limits)}"] if limits else []
    for name, case in zip(names, record.cases, strict=True):
        found = case.evidence
        if found.status in ("unchanged", "skipped"):
            lines.append(f"{name} {found.status}: {plain(found.reason)}")
        elif (mark := below_limit(case)) is not None:
            sqnr_db = found.parity.sqnr_db if found.parity is not None else 0.0
            lines.append(f"{name}: its SQNR of {db_text(sqnr_db)} dB is below {mark:g} dB")
        lines += front_lines(name, found.search)
    return lines


def front_lines(name: str, search: SearchResult | None) -> list[str]:
    """The front of latency and accuracy of a search with both objectives: time over the reference's, and SQNR."""
    if search is None:
        return []
    points = [
        f"{ratio_text(point.ratio.median)} at {db_text(point.sqnr_db)} dB"
        + (" (selected)" if point.placement == search.winner.digest else "")
        for point in search.front
        if point.sqnr_db < EXACT_DB
    ]
    return [f"{name} front, time over the reference's: {', '.join(points)}"] if points else []


def below_limit(case: CaseRecord) -> float | None:
    """The SQNR limit that a tuned model is below, also the default one if it was disabled; ``None`` for none."""
    parity, search = case.evidence.parity, case.evidence.search
    marked = None if search is None else search.limits.marked_db
    return marked if parity is not None and marked is not None and parity.sqnr_db < marked else None


def limit_text(limits: SearchLimits) -> str:
    """``20 dB by default``: the accuracy constraint of a search, for tables and reports."""
    if limits.min_sqnr_db is not None:
        origin = "by default" if limits.source == "default" else "(tune.min_sqnr_db)"
        return f"{limits.min_sqnr_db:g} dB {origin}"
    return (
        "none (tune.accuracy is the constraint)" if limits.source == "metric" else "none (min_sqnr_db: none)"
    )


def _by_case(limits: dict[str, list[str]]) -> str:
    if len(limits) == 1:
        return next(iter(limits))
    return "; ".join(f"{text}: {list_text(names, _SHOWN)}" for text, names in limits.items())
