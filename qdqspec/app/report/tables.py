"""Tables of plain text by their columns, the summary table at the end of a run, and the texts below the table.

A cell is one printable line; each report format escapes its own syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from tabulate import SEPARATING_LINE, tabulate

from qdqspec._core.units import (
    db_text,
    interval_text,
    list_text,
    ms_text,
    plain,
    proved_text,
    ratio_text,
    seconds_text,
    share_text,
    texts_apart,
)
from qdqspec.types import (
    EXACT_DB,
    Case,
    CaseRecord,
    CheckResult,
    Evidence,
    Interval,
    LatencyEvidence,
    RunRecord,
    SearchLimits,
    Section,
)

RIGHT = "right"
_NAME_WIDTH = 44
_NAMED_CASES = 4  # with one limit
_SOURCES = {"cached": "from the cache", "replayed": "from the journal of an earlier run"}

_Row = TypeVar("_Row")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Column(Generic[_Row]):
    """A column: its heading, its text for a row (empty if unknown), and its alignment.

    Columns with the largest ``rank`` are dropped first if the table is too wide.
    """

    title: str
    cell: Callable[[_Row], str]
    align: str = "left"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; ``align`` is ``left`` or ``right`` for each column."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: tuple[str, ...]

    @classmethod
    def of(cls, title: str, rows: Iterable[_Row], *columns: Column[_Row]) -> Table:
        """A table with one row of text for each of the ``rows``."""
        cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
        heads = tuple(column.title for column in columns)
        return cls(title, heads, cells, tuple(column.align for column in columns))

    @property
    def text(self) -> str:
        """The table without its title, for a terminal."""
        align = self.align if self.rows else None
        return tabulate(self.rows, headers=self.headers, colalign=align, disable_numparse=True)


def known(text: Callable[[_Value], str], value: _Value | None) -> str:
    """The text of a value; empty if it is unknown."""
    return "" if value is None else text(value)


def median_text(ratio: Interval | None) -> str:
    """The median of a factor; empty if it is unknown."""
    return "" if ratio is None else ratio_text(ratio.median)


def bounds_text(ratio: Interval | None) -> str:
    """The bounds of a factor; empty if it is unknown or exact."""
    return "" if ratio is None or ratio.low == ratio.high else interval_text(ratio)


def section_text(section: Section, widest: int = 116) -> str:
    """A titled table, or titled text.

    A table of few rows with more than ``widest`` characters in a line has a line for each column instead: with a larger
    number its lines wrap on a terminal of 120 columns.
    """
    body = section.text
    if section.rows:
        table = str(tabulate(section.rows, headers=section.headers, disable_numparse=True))
        if table.index("\n") > widest and len(section.rows) < len(section.headers) / 2:
            turned = list(zip(section.headers, *section.rows, strict=True))
            table = str(tabulate(turned, tablefmt="plain", disable_numparse=True))
        body = f"{table}\n{body}" if body else table
    return "\n".join((section.title, *(f"  {line}".rstrip() for line in body.splitlines())))


# ---- the summary of a run ------------------------------------------------------------------------


def summary_table(record: RunRecord, *, width: int | None = None) -> str:
    """One row per case, and below it the properties that all have in common.

    Columns without values are omitted; ``width`` drops more if necessary.
    """
    if not record.cases:
        return "No case was run."
    columns = shown_columns(record.cases)
    while True:
        # Heads are a row above a separating line: tabulate would pad each column by two for headers.
        rows = [[column.cell(case) for column in columns] for case in record.cases]
        text = tabulate(
            [[column.title for column in columns], SEPARATING_LINE, *rows],
            colalign=[column.align for column in columns],
            tablefmt="simple",
            disable_numparse=True,
        )
        lines = [line.rstrip() for line in text.splitlines()[1:-1]]
        worst = max(columns, key=lambda column: column.rank)
        if width is None or max(map(len, lines)) <= width or not worst.rank:
            return "\n".join([*lines, _footer_text(record)])
        columns.remove(worst)


def shown_columns(cases: Sequence[CaseRecord]) -> list[Column[CaseRecord]]:
    """The columns with a value in some case; the backend is a column only if the measured cases differ in it."""
    several = len({case.evidence.target for case in cases if not case.evidence.skipped}) > 1
    cells = {id(case): _cells(case, plain(name, _NAME_WIDTH)) for case, name in named_cases(cases)}

    def column(title: str, align: str = "left", rank: int = 0) -> Column[CaseRecord]:
        return Column(title, lambda case: cells[id(case)].get(title, ""), align, rank)

    columns = [
        column("case"),
        *([column("backend", rank=4)] if several else []),
        column("ref ms", RIGHT, 2),
        column("tuned ms", RIGHT, 2),
        column("speed-up"),
        column("covered", RIGHT, 4),
        column("SQNR dB", RIGHT, 1),
        column("accuracy", RIGHT, 3),
        column("figures", RIGHT, 7),
        column("built", RIGHT, 6),
        column("pairs", RIGHT, 5),
        column("checks"),
    ]
    return [one for one in columns if any(map(one.cell, cases))]


def _cells(case: CaseRecord, name: str) -> dict[str, str]:
    """The row of a case by column; a value that is not known is empty.

    An SQNR below its limit has the limit: ``7.9 < 20``. Of the candidates, those that were built are counted, out of
    all if some failed. One or two checks that did not pass are named, more of them and the others are counted.
    """
    found, search, parity = case.evidence, case.evidence.search, case.evidence.parity
    latency, final = found.latency, latency_of(found)
    times = {role: ms_text(final.median_ms(role)) for role in final.samples} if final is not None else {}
    speedup = sqnr = ""
    if found.status in ("unchanged", "untimed", "skipped"):
        speedup = found.status
    elif latency is not None and "tuned" in latency.samples:
        speedup = f"{ratio_text(latency.speedup.median)}x{proved_text(latency, found.min_gain)}"
    if parity is not None and parity.outputs:
        limit = _missed_limit(case)
        sqnr = (
            db_text(parity.sqnr_db) if limit is None else f"{_below_text(parity.sqnr_db, limit)} < {limit:g}"
        )
        if parity.sqnr_db >= EXACT_DB and not all(output.matches for output in parity.outputs):
            sqnr = "not equal"
    figures = (  # that checks measured themselves
        f"{plain(key, 16)}.{plain(figure, 16)} {value:.4g}"
        for key, own in found.figures.items()
        for figure, value in own.items()
    )
    words = [verdict_word(result) for result in case.results]
    loud = [word for word in ("FAIL", "WARN", "inconclusive") for own in words if own == word]
    checks = [f"{loud.count(word)} {word}" for word in dict.fromkeys(loud)]
    if len(loud) <= 2:
        named = zip(case.results, words, strict=True)
        checks = [f"{plain(result.id, 16)} {word}" for result, word in named if word != "pass"]
    checks += [f"{words.count('pass')} passed"] if "pass" in words else []
    cells = {
        "case": name,
        "backend": plain(found.target, 24),
        "ref ms": times.get("reference", ""),
        "tuned ms": times.get("tuned", ""),
        "speed-up": speedup,
        "SQNR dB": sqnr,
        "accuracy": ", ".join(f"{plain(name, 16)} {value:.4g}" for name, value in found.metrics.items()),
        "figures": ", ".join(figures),
        "checks": ", ".join(checks),
    }
    if search is not None:
        cells["covered"] = known(lambda coverage: share_text(coverage.share), search.coverage)
        cells["built"] = f"{search.built} of {search.total}" if search.failed else str(search.built)
        cells["pairs"] = str(search.winner.pairs)
    return cells


def named_cases(cases: Sequence[CaseRecord]) -> list[tuple[CaseRecord, str]]:
    """Each case with its name, distinct over all specs of a run.

    ``net::default``; ``specs/door/net::default`` if specs in several folders have that name. The name of a private
    folder, which may contain a user's name, is not written; specs in such folders are numbered.
    """
    specs: dict[str, list[Path | None]] = {}
    for case in (record.evidence.case for record in cases):
        own = specs.setdefault(case.name, [])
        own += [case.spec] if case.spec not in own else []
    named = []
    for record in cases:
        case, name = record.evidence.case, record.evidence.case.name
        if len(specs[name]) > 1:
            folder = PurePosixPath(spec_path(case) or "").parent
            number = specs[name].index(case.spec) + 1
            if folder != PurePosixPath():
                name = f"{folder}/{name}"
            elif number > 1:
                name = f"{name} ({number})"
        named.append((record, name))
    return named


def spec_path(case: Case) -> str | None:
    """The spec's path relative to the working directory, or its name alone if it is outside."""
    if case.spec is None:
        return None
    if case.spec.is_relative_to(Path.cwd()):
        return case.spec.relative_to(Path.cwd()).as_posix()
    return case.spec.name if case.spec.is_absolute() else case.spec.as_posix()


def latency_of(found: Evidence) -> LatencyEvidence | None:
    """The final measurement, without the tuned model of an unchanged case: it is the reference."""
    latency = found.latency
    if latency is None or found.status != "unchanged":
        return latency
    return replace(latency, samples={role: own for role, own in latency.samples.items() if role != "tuned"})


def verdict_word(result: CheckResult) -> str:
    """``pass``, ``FAIL``, ``WARN`` or ``inconclusive``."""
    if result.verdict.outcome == "fail":
        return "FAIL" if result.severity == "error" else "WARN"
    return result.verdict.outcome


# ---- below the summary ---------------------------------------------------------------------------


def _footer_text(record: RunRecord) -> str:
    found = [case.evidence for case in record.cases]
    devices = dict.fromkeys(f"{plain(e.target)} on {plain(e.device.key)}" for e in found if e.device.key)
    clocks = dict.fromkeys(e.latency.clock for e in found if e.latency)
    first = "; ".join(devices) or "No case ran"
    if clocks:
        first += f", medians on the {' and '.join(clocks)} clock, bounds of 95 % intervals"
    runtimes = dict.fromkeys(e.parity.computed_by for e in found if e.parity and e.parity.computed_by)
    if runtimes:
        first += f"; SQNR and accuracy computed by {', '.join(runtimes)} as ONNX defines the models"
    if any(e.latency and e.latency.profiles for e in found):
        first += "; of several shape profiles the weighted geometric mean"
    older: dict[str, list[str]] = {}  # the cases and ages of each kind of earlier results
    for case, name in named_cases(record.cases):
        what, age, anew = _earlier_results(case)
        if what:
            older.setdefault(f"{what}{anew}", []).append(f"{plain(name, _NAME_WIDTH)} ({age} old)")
    found_before = [f"{what}: {', '.join(named)}" for what, named in older.items()]
    return "\n".join([first, *found_before, *_status_lines(record)])


def provenance_text(case: CaseRecord) -> str:
    """The part of a result from an earlier run: the times, or only the placement; empty if there is none."""
    what, age, anew = _earlier_results(case)
    return f"{what}, {age} old{anew}" if what else ""


def _earlier_results(case: CaseRecord) -> tuple[str, str, str]:
    """The earlier results and their source, their age, and the results of this run; empty if there are none."""
    latency, search = case.evidence.latency, case.evidence.search
    if latency is not None and latency.provenance.source != "measured":
        source, what, anew = latency.provenance, "the placement and its times are", ""
    elif search is not None and search.provenance.source != "measured":
        times = "no times were measured" if latency is None else "its times were measured in this run"
        source, what, anew = search.provenance, "the placement is", f"; {times}"
    else:
        return "", "", ""
    words = _SOURCES.get(source.source, source.source)
    return f"{what} {words}", seconds_text(source.age_seconds, rough=True), anew


def _status_lines(record: RunRecord) -> list[str]:
    """The SQNR limit, by case if cases differ in it; then lines on cases that are unchanged or
    skipped, on checks that are inconclusive, and fronts.
    """
    cases = [(case, plain(name, _NAME_WIDTH)) for case, name in named_cases(record.cases)]
    limits: dict[str, list[str]] = {}
    for case, name in cases:
        if case.evidence.search is not None:
            limits.setdefault(limit_text(case.evidence.search.limits), []).append(name)
    by_case = [f"{limit}: {list_text(names, _NAMED_CASES)}" for limit, names in limits.items()]
    lines = [f"SQNR limit: {'; '.join(by_case if len(limits) > 1 else limits)}"] if limits else []
    for case, name in cases:
        found = case.evidence
        if found.status in ("unchanged", "untimed", "skipped"):
            lines.append(f"{name} {found.status}: {plain(found.reason)}")
        elif found.parity is not None and (limit := _missed_limit(case)) is not None:
            shown = _below_text(found.parity.sqnr_db, limit)
            lines.append(f"{name}: its SQNR of {shown} dB is below {limit:g} dB")
        lines += [
            f"{name} {plain(result.id)} inconclusive: {plain(result.verdict.headline)}"
            for result in case.results
            if result.verdict.outcome == "inconclusive"
        ]
        front = [
            f"{ratio_text(point.ratio.median)} at {db_text(point.sqnr_db)} dB"
            + (" (selected)" if found.search and point.placement == found.search.winner.digest else "")
            for point in (found.search.front if found.search else ())
            if point.sqnr_db < EXACT_DB
        ]
        lines += [f"{name} front, time / reference time: {', '.join(front)}"] if front else []
    return lines


def _missed_limit(case: CaseRecord) -> float | None:
    """The SQNR limit that a tuned model is below, also the default one if it was disabled; ``None`` for none."""
    parity, search = case.evidence.parity, case.evidence.search
    limit = None if search is None else search.limits.marked_db
    return limit if parity is not None and limit is not None and parity.sqnr_db < limit else None


def _below_text(sqnr_db: float, limit: float) -> str:
    """An SQNR with enough digits to see that it is below the limit."""
    return texts_apart(lambda value, more: f"{value:.{1 + more}f}", sqnr_db, limit)[0]


def limit_text(limits: SearchLimits) -> str:
    """``20 dB by default``: the accuracy constraint of a search, for tables and reports."""
    if limits.min_sqnr_db is not None:
        origin = "by default" if limits.source == "default" else "(tune.min_sqnr_db)"
        return f"{limits.min_sqnr_db:g} dB {origin}"
    return (
        "none (tune.accuracy is the constraint)" if limits.source == "metric" else "none (min_sqnr_db: none)"
    )


def warning_lines(record: RunRecord) -> list[str]:
    """``warning: squeezenet::default: ...``, each once; a warning of several cases names the first ones."""
    cases: dict[str, list[str]] = {}
    for case, name in named_cases(record.cases):
        for text in case.evidence.warnings:
            cases.setdefault(text, []).append(name)
    return [f"warning: {list_text(names, 2)}: {text}" for text, names in cases.items()]
