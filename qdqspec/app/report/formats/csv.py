"""One row per case, for spreadsheets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping

from qdqspec._core.units import cell_text, origin_text, plain
from qdqspec.app.report.tables import verdict_word
from qdqspec.types import CaseRecord, RunRecord


def _part(path: str) -> Callable[[CaseRecord], object]:
    """A part of the evidence by its path of field names; ``None`` if a field on the path is ``None``."""

    def value(case: CaseRecord) -> object:
        found: object = case.evidence
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return found

    return value


def _median_ms(case: CaseRecord, role: str) -> float | None:
    latency = case.evidence.latency
    return latency.median_ms(role) if latency is not None and role in latency.samples else None


def _parity(case: CaseRecord, name: str) -> object:
    parity = case.evidence.parity
    return getattr(parity, name) if parity is not None and parity.outputs else None


def _checks(word: str) -> Callable[[CaseRecord], object]:
    return lambda case: sum(verdict_word(result) == word for result in case.results)


def _named(figures: Mapping[str, float], prefix: str = "") -> str:
    return " ".join(f"{prefix}{name}={value!r}" for name, value in figures.items())


_COLUMNS: dict[str, Callable[[CaseRecord], object]] = {
    "spec": _part("case.spec_name"),
    "case": _part("case.id"),
    "backend": _part("target"),
    "device": _part("device.key"),
    "clock": _part("latency.clock"),
    "reference_ms": lambda case: _median_ms(case, "reference"),
    "tuned_ms": lambda case: _median_ms(case, "tuned"),
    "speedup": _part("latency.speedup.median"),
    "speedup_low": _part("latency.speedup.low"),
    "speedup_high": _part("latency.speedup.high"),
    "speedup_at_least": _part("latency.at_least"),
    "status": _part("status"),
    "reason": _part("reason"),
    "sqnr_db": lambda case: _parity(case, "sqnr_db"),
    "cosine": lambda case: _parity(case, "cosine"),
    "max_abs": lambda case: _parity(case, "max_abs"),
    "accuracy": lambda case: _named(case.evidence.metrics),
    "figures": lambda case: " ".join(_named(f, f"{key}.") for key, f in case.evidence.figures.items() if f),
    "trials_built": _part("search.built"),
    "trials_failed": _part("search.failed"),
    "search_seconds": _part("search.seconds"),
    "pairs": _part("search.winner.pairs"),
    "size_reference_bytes": lambda case: case.evidence.size_bytes.get("reference"),
    "size_tuned_bytes": lambda case: case.evidence.size_bytes.get("tuned"),
    "checks_passed": _checks("pass"),
    "checks_failed": _checks("FAIL"),
    "checks_inconclusive": _checks("inconclusive"),
    "provenance": lambda case: "".join(
        origin_text(found.provenance) for found in [case.evidence.latency or case.evidence.search] if found
    ),
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
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return cell_text(value)
    return "" if value is None else plain(value)


report_format = CsvFormat()
