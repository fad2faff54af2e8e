"""One row per case, for spreadsheets."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter

from qdqspec.types import CaseRecord, LatencyEvidence, RunRecord
from qdqspec.units import plain

_COLUMNS = (
    "spec",
    "case",
    "backend",
    "device",
    "clock",
    "reference_ms",
    "tuned_ms",
    "speedup",
    "speedup_low",
    "speedup_high",
    "status",
    "reason",
    "sqnr_db",
    "cosine",
    "max_abs",
    "accuracy",
    "figures",
    "trials_built",
    "trials_failed",
    "search_seconds",
    "pairs",
    "size_reference_bytes",
    "size_tuned_bytes",
    "checks_passed",
    "checks_failed",
    "checks_inconclusive",
    "provenance",
)


class CsvFormat:
    """Full precision, a point as decimal mark, empty for unknown values."""

    suffix = ".csv"

    def render(self, record: RunRecord) -> str:
        """The header row, then one row per case."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for case in record.cases:
            writer.writerow({name: _cell(value) for name, value in _row(case).items()})
        return text.getvalue()


def _cell(value: object) -> str:
    """One printable line. Text that a spreadsheet would evaluate as a formula gets an apostrophe in front."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        line = plain(value)
        return f"'{line}" if line[:1] in ("=", "+", "-", "@") else line
    return "" if value is None else str(value)


def _row(case: CaseRecord) -> dict[str, object]:
    found = case.evidence
    outcomes = Counter(result.verdict.outcome for result in case.results)
    older = found.latency or found.search
    return {
        "spec": found.case.spec_name,
        "case": found.case.id,
        "backend": found.target,
        "device": found.device.key,
        "status": found.status,
        "reason": found.reason,
        **(_latency(found.latency) if found.latency else {}),
        **_quality(case),
        **_search(case),
        "size_reference_bytes": found.size_bytes.get("reference"),
        "size_tuned_bytes": found.size_bytes.get("tuned"),
        "checks_passed": outcomes["pass"],
        "checks_failed": outcomes["fail"],
        "checks_inconclusive": outcomes["inconclusive"],
        "provenance": str(older.provenance) if older else None,
    }


def _latency(latency: LatencyEvidence) -> dict[str, object]:
    medians = {
        f"{role}_ms": latency.median_ms(role) for role in ("reference", "tuned") if role in latency.samples
    }
    speedup = latency.speedup
    return {
        "clock": latency.clock,
        **medians,
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
    }


def _quality(case: CaseRecord) -> dict[str, object]:
    parity, metrics = case.evidence.parity, case.evidence.metrics
    numbers: dict[str, object] = {
        "accuracy": " ".join(f"{name}={value!r}" for name, value in metrics.items()),
        "figures": " ".join(
            f"{key}.{name}={value!r}"
            for key, figures in case.evidence.figures.items()
            for name, value in figures.items()
        ),
    }
    if parity is not None and parity.outputs:
        numbers |= {"sqnr_db": parity.sqnr_db, "cosine": parity.cosine, "max_abs": parity.max_abs}
    return numbers


def _search(case: CaseRecord) -> dict[str, object]:
    search = case.evidence.search
    if search is None:
        return {}
    return {
        "trials_built": search.built,
        "trials_failed": search.failed,
        "search_seconds": search.seconds,
        "pairs": search.winner.pairs,
    }


report_format = CsvFormat()
