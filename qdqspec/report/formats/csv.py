"""One row per case, for spreadsheets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable

from qdqspec.types import CaseRecord, LatencyEvidence, RunRecord, SearchResult
from qdqspec.units import plain


def _latency(value: Callable[[LatencyEvidence], object]) -> Callable[[CaseRecord], object]:
    return lambda case: None if case.evidence.latency is None else value(case.evidence.latency)


def _search(value: Callable[[SearchResult], object]) -> Callable[[CaseRecord], object]:
    return lambda case: None if case.evidence.search is None else value(case.evidence.search)


def _median(role: str) -> Callable[[CaseRecord], object]:
    return _latency(lambda latency: latency.median_ms(role) if role in latency.samples else None)


def _parity(name: str) -> Callable[[CaseRecord], object]:
    def value(case: CaseRecord) -> object:
        parity = case.evidence.parity
        return None if parity is None or not parity.outputs else getattr(parity, name)

    return value


def _size(role: str) -> Callable[[CaseRecord], object]:
    return lambda case: case.evidence.size_bytes.get(role)


def _checks(outcome: str) -> Callable[[CaseRecord], object]:
    return lambda case: sum(result.verdict.outcome == outcome for result in case.results)


def _accuracy(case: CaseRecord) -> str:
    return " ".join(f"{name}={value!r}" for name, value in case.evidence.metrics.items())


def _figures(case: CaseRecord) -> str:
    return " ".join(
        f"{key}.{name}={value!r}"
        for key, figures in case.evidence.figures.items()
        for name, value in figures.items()
    )


def _provenance(case: CaseRecord) -> str | None:
    older = case.evidence.latency or case.evidence.search
    return str(older.provenance) if older else None


_COLUMNS: dict[str, Callable[[CaseRecord], object]] = {
    "spec": lambda case: case.evidence.case.spec_name,
    "case": lambda case: case.evidence.case.id,
    "backend": lambda case: case.evidence.target,
    "device": lambda case: case.evidence.device.key,
    "clock": _latency(lambda latency: latency.clock),
    "reference_ms": _median("reference"),
    "tuned_ms": _median("tuned"),
    "speedup": _latency(lambda latency: latency.speedup.median),
    "speedup_low": _latency(lambda latency: latency.speedup.low),
    "speedup_high": _latency(lambda latency: latency.speedup.high),
    "status": lambda case: case.evidence.status,
    "reason": lambda case: case.evidence.reason,
    "sqnr_db": _parity("sqnr_db"),
    "cosine": _parity("cosine"),
    "max_abs": _parity("max_abs"),
    "accuracy": _accuracy,
    "figures": _figures,
    "trials_built": _search(lambda search: search.built),
    "trials_failed": _search(lambda search: search.failed),
    "search_seconds": _search(lambda search: search.seconds),
    "pairs": _search(lambda search: search.winner.pairs),
    "size_reference_bytes": _size("reference"),
    "size_tuned_bytes": _size("tuned"),
    "checks_passed": _checks("pass"),
    "checks_failed": _checks("fail"),
    "checks_inconclusive": _checks("inconclusive"),
    "provenance": _provenance,
}


class CsvFormat:
    """Full precision, a point as decimal mark, empty for unknown values."""

    suffix = ".csv"

    def render(self, record: RunRecord) -> str:
        """The header row, then one row per case."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for case in record.cases:
            writer.writerow(_cell(value(case)) for value in _COLUMNS.values())
        return text.getvalue()


def _cell(value: object) -> str:
    """One printable line. Text that a spreadsheet would evaluate as a formula gets an apostrophe in front."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        line = plain(value)
        return f"'{line}" if line[:1] in ("=", "+", "-", "@") else line
    return "" if value is None else str(value)


report_format = CsvFormat()
