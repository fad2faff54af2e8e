"""The summary table at the end of a run, and texts below it: limits, why cases are unchanged, warnings, sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tabulate import SEPARATING_LINE, tabulate

from qdqspec.report.names import distinct_names
from qdqspec.types import (
    EXACT_DB,
    CaseRecord,
    Evidence,
    LatencyEvidence,
    Provenance,
    RunRecord,
    SearchLimits,
    SearchResult,
    Section,
)
from qdqspec.units import db_text, interval_text, list_text, ms_text, plain, ratio_text, wrapped

_NAME_WIDTH = 44


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, its text for a case (empty if unknown), and its alignment.

    Columns with the largest ``rank`` are dropped first if the table is too wide.
    """

    title: str
    cell: Callable[[CaseRecord], str]
    align: str = "right"
    rank: int = 0


def summary_table(record: RunRecord, *, width: int | None = None) -> str:
    """One row per case, and below it the properties that all have in common.

    Columns without values are omitted; ``width`` drops more if necessary.
    """
    if not record.cases:
        return "No case was run."
    columns = shown_columns(record.cases)
    table = grid(record.cases, columns)
    while width is not None and _wide(table) > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
        table = grid(record.cases, columns)
    return f"{table}\n{wrapped(_footer(record), width)}"


def grid(cases: Sequence[CaseRecord], columns: Sequence[Column]) -> str:
    """The columns of the cases as aligned text."""
    rows = [[column.cell(case) for column in columns] for case in cases]
    # As a row above a separating line: tabulate would pad each column by two for headers.
    heads = [column.title for column in columns]
    text = tabulate(
        [heads, SEPARATING_LINE, *rows],
        colalign=[column.align for column in columns],
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines()[1:-1])


def _footer(record: RunRecord) -> str:
    devices = {
        f"{plain(case.evidence.target)} on {plain(case.evidence.device.key)}": None
        for case in record.cases
        if not case.evidence.skipped
    }
    clocks = {case.evidence.latency.clock: None for case in record.cases if case.evidence.latency}
    first = "; ".join(devices) or "No case ran"
    if clocks:
        first += f", medians on the {' and '.join(clocks)} clock with 95 % intervals"
    if any(case.evidence.latency and case.evidence.latency.profiles for case in record.cases):
        first += "; of several shape profiles the weighted geometric mean"
    return "\n".join([first, *_older_lines(record), *status_lines(record)])


def _wide(text: str) -> int:
    return max(len(line) for line in text.splitlines())


def shown_columns(cases: Sequence[CaseRecord]) -> list[Column]:
    """The columns with a value in some case; that of the backend only if cases differ in it."""
    columns = [column for column in columns_of(cases) if any(column.cell(case) for case in cases)]
    several = len({case.evidence.target for case in cases}) > 1
    return [column for column in columns if several or column.cell is not backend_text]


def columns_of(cases: Sequence[CaseRecord]) -> tuple[Column, ...]:
    """All columns of a table of these cases. Long names are cut in the middle."""
    names = {id(case): name for case, name in zip(cases, distinct_names(cases), strict=True)}
    return (Column("case", lambda case: plain(names[id(case)], _NAME_WIDTH), "left"), *_COLUMNS)


def backend_text(case: CaseRecord) -> str:
    """The backend and its variant."""
    return plain(case.evidence.target, 24)


def latency_of(found: Evidence) -> LatencyEvidence | None:
    """The final measurement, without the tuned model of an unchanged case: it is the reference."""
    latency = found.latency
    if latency is None or found.status != "unchanged":
        return latency
    return replace(latency, samples={role: own for role, own in latency.samples.items() if role != "tuned"})


def median_text(role: str) -> Callable[[CaseRecord], str]:
    """A role's median in milliseconds; empty if it was not measured, or is that of the reference."""

    def cell(case: CaseRecord) -> str:
        latency = latency_of(case.evidence)
        return ms_text(latency.median_ms(role)) if latency is not None and role in latency.samples else ""

    return cell


def speedup_text(case: CaseRecord) -> str:
    """The factor with its interval, ``unchanged``, or ``skipped``."""
    if case.evidence.status in ("unchanged", "skipped"):
        return case.evidence.status
    latency = case.evidence.latency
    if latency is None or "tuned" not in latency.samples:
        return ""
    return f"{ratio_text(latency.speedup.median)}x ({interval_text(latency.speedup)})"


def sqnr_text(case: CaseRecord) -> str:
    """The worst output's SQNR in dB; with the limit if it is below: ``7.9 < 20``."""
    parity, limit = case.evidence.parity, below_limit(case)
    if parity is None or not parity.outputs:
        return ""
    if parity.sqnr_db >= EXACT_DB and not all(output.matches for output in parity.outputs):
        return "not equal"
    return db_text(parity.sqnr_db) if limit is None else f"{db_text(parity.sqnr_db)} < {limit:g}"


def accuracy_text(case: CaseRecord) -> str:
    """Each metric of the tuned model."""
    return ", ".join(f"{plain(name, 16)} {value:.4g}" for name, value in case.evidence.metrics.items())


def figures_text(case: CaseRecord) -> str:
    """The figures that checks measured themselves: ``mean-shift.largest 0.12``."""
    return ", ".join(
        f"{plain(key, 16)}.{plain(name, 16)} {value:.4g}"
        for key, figures in case.evidence.figures.items()
        for name, value in figures.items()
    )


def trials_text(case: CaseRecord) -> str:
    """Number of candidates built; out of how many, if some failed."""
    search: SearchResult | None = case.evidence.search
    if search is None:
        return ""
    return f"{search.built} of {search.total}" if search.failed else str(search.built)


def pairs_text(case: CaseRecord) -> str:
    """Number of activation pairs placed."""
    search = case.evidence.search
    return "" if search is None else str(search.winner.pairs)


def verdicts_text(case: CaseRecord) -> str:
    """Results of the checks: one or two that did not pass by id, more of them and the others by number."""
    loud = [(r.id, _LOUD[r.severity, r.verdict.outcome]) for r in case.results if r.verdict.outcome != "pass"]
    passed = len(case.results) - len(loud)
    if len(loud) <= _NAMED_VERDICTS:
        said = [f"{plain(name, 16)} {word}" for name, word in loud]
    else:
        words = [word for _, word in loud]
        said = [f"{words.count(word)} {word}" for word in dict.fromkeys(_LOUD.values()) if word in words]
    return ", ".join([*said, *([f"{passed} passed"] if passed else [])])


_NAMED_VERDICTS = 2
_LOUD = {
    ("error", "fail"): "FAIL",
    ("warn", "fail"): "WARN",
    ("error", "inconclusive"): "inconclusive",
    ("warn", "inconclusive"): "inconclusive",
}


def provenance_text(case: CaseRecord) -> str:
    """The part of a result from an earlier run: the times, or only the placement; empty if there is none."""
    older, what, anew = _older(case)
    return f"{what} {older.source_text}, {older.age} old{anew}" if what else ""


def _older_lines(record: RunRecord) -> list[str]:
    """A line for each kind of earlier results, with the cases and the age of each."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, case in zip(distinct_names(record.cases), record.cases, strict=True):
        older, what, anew = _older(case)
        if what:
            named = lines.setdefault((f"{what} {older.source_text}", anew), [])
            named.append(f"{plain(name, _NAME_WIDTH)} ({older.age} old)")
    return [f"{what}{anew}: {', '.join(named)}" for (what, anew), named in lines.items()]


def _older(case: CaseRecord) -> tuple[Provenance, str, str]:
    """The source of earlier results, their content, and the results of this run; empty if there are none."""
    latency, search = case.evidence.latency, case.evidence.search
    times = Provenance() if latency is None else latency.provenance
    if times.source != "measured":
        return times, "the placement and its times are", ""
    if search is None or search.provenance.source == "measured":
        return times, "", ""
    anew = "no times were measured" if latency is None else "its times were measured in this run"
    return search.provenance, "the placement is", f"; {anew}"


_COLUMNS = (
    Column("backend", backend_text, "left", rank=4),
    Column("ref ms", median_text("reference"), rank=2),
    Column("tuned ms", median_text("tuned"), rank=2),
    Column("speed-up", speedup_text, "left"),
    Column("SQNR dB", sqnr_text, rank=1),
    Column("accuracy", accuracy_text, rank=3),
    Column("figures", figures_text, rank=7),
    Column("built", trials_text, rank=6),
    Column("pairs", pairs_text, rank=5),
    Column("checks", verdicts_text, "left"),
)


def warning_lines(record: RunRecord) -> list[str]:
    """``warning: squeezenet::default: ...``, each once; a warning of several cases names the first ones."""
    cases: dict[str, list[str]] = {}
    for name, case in zip(distinct_names(record.cases), record.cases, strict=True):
        for text in case.evidence.warnings:
            cases.setdefault(text, []).append(name)
    return [f"warning: {list_text(names, 2)}: {text}" for text, names in cases.items()]


def section_text(section: Section) -> str:
    """A titled table, or titled text."""
    body = section.text
    if section.rows:
        table = str(tabulate(section.rows, headers=section.headers, disable_numparse=True))
        body = f"{table}\n{body}" if body else table
    return "\n".join((section.title, *(f"  {line}".rstrip() for line in body.splitlines())))


_SHOWN = 4  # names of cases listed under one limit
_WIDTH = 44


def status_lines(record: RunRecord) -> list[str]:
    """The SQNR limit, by case if cases differ in it; then lines on cases that are unchanged or
    skipped, on checks that are inconclusive, and fronts.
    """
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
        lines += [
            f"{name} {plain(result.id)} inconclusive: {plain(result.verdict.headline)}"
            for result in case.results
            if result.verdict.outcome == "inconclusive"
        ]
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
