"""One self-contained page: no script, no other file, charts as inline SVG. Its markup is in ``page.html.j2``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from qdqspec._core.units import count_text, plain, ratio_text
from qdqspec.app.report import facts
from qdqspec.app.report.charts import (
    INSTALL,
    baseline_chart,
    front_chart,
    latency_chart,
    layers_chart,
    model_graph,
    search_chart,
    style_of,
)
from qdqspec.app.report.compare import conclusions, runtimes_table
from qdqspec.app.report.formats import DETAILS_LEFT_OUT, cases_left_out, fit_page
from qdqspec.app.report.tables import Table, latency_of, named_cases
from qdqspec.types import CaseRecord, Evidence, RunRecord

LIMIT_BYTES = 1_000_000
_MOST_FAILURES = 50
_SYMBOLS = {"FAIL": "\u2717", "WARN": "!", "inconclusive": "?", "pass": "\u2713"}  # in the order of a page
_FOLDER = Path(__file__).parent
_STYLE = (_FOLDER / "page.css").read_text(encoding="utf-8")  # light, dark and print


def _characters(table: Table) -> int:
    """The characters of its widest row."""
    columns = zip(table.headers, *table.rows, strict=True)
    return sum(max(map(len, cells)) for cells in columns)


_environment = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    finalize=lambda value: plain(value) if type(value) is str else value,  # markup is left as it is
)
_environment.globals.update(
    SYMBOLS=_SYMBOLS,
    MAX_ROWS=facts.MAX_ROWS,
    STACKED=40,  # rows
    WIDE=64,  # characters of a row that does not fit beside another table
    NARROW=40,  # characters of a row that fits on a page of 400 pixels
    characters=_characters,
    zip=zip,
)
_pieces: Any = _environment.get_template("page.html.j2").module


class HtmlFormat:
    """An HTML page for light and dark screens, and for print."""

    suffix = ".html"

    def render(self, record: RunRecord) -> str:
        """The whole page, below 1 MB; all failed checks come before everything else."""
        cases = named_cases(record.cases)
        failures = [
            (index, name, check, headline)
            for index, (case, name) in enumerate(cases)
            for word, check, headline in facts.checks_table(case).rows
            if word == "FAIL"
        ]
        head = [_pieces.head(_STYLE, facts.run_line(record))]
        if failures:
            more = len(failures) - _MOST_FAILURES
            left = f"and {count_text(more, 'more failed check')}" if more > 0 else ""
            count = count_text(len(failures), "failed check")
            head.append(_pieces.failures(failures[:_MOST_FAILURES], count, left))
        if cases:
            head.append(_pieces.summary(facts.summary(record), {index for index, *_ in failures}))
        else:
            head.append('<p class="card">No case was run.</p>')
        head += [_pieces.runtimes(runtimes_table(found), conclusions(found)) for found in record.runtimes]

        def render_cases(details: bool) -> list[str]:
            return [
                "\n".join(_case_pieces(case, name, index, details=details))
                for index, (case, name) in enumerate(cases)
            ]

        texts = fit_page(
            head, render_cases, [_pieces.tail()], LIMIT_BYTES, lambda n: _pieces.note(cases_left_out(n))
        )
        return "\n".join(texts) + "\n"


def _case_pieces(case: CaseRecord, name: str, index: int, *, details: bool) -> Iterator[str]:
    found, latency = case.evidence, case.evidence.latency
    gain, is_word = "", found.status in ("unchanged", "untimed", "skipped")
    if is_word:
        gain = found.status
    elif latency is not None and "tuned" in latency.samples:
        gain = ratio_text(latency.speedup.median)
    warnings = [plain(warning, facts.LONG) for warning in found.warnings]
    yield _pieces.case_head(name, index, facts.lead_lines(case), gain, is_word, warnings)
    order = list(_SYMBOLS)
    checks = sorted(facts.checks_table(case).rows, key=lambda row: order.index(row[0]))
    yield _pieces.checks(checks, dict(facts.advice_rows(case)))
    if charts := _charts(found):
        yield '<div class="charts">'
        yield from charts
        yield "</div>"
    if found.graph and details:
        yield _drawn_model(found)
    yield '<div class="tables">'
    yield from map(_pieces.section, facts.case_tables(found))
    yield "</div>"
    yield _pieces.facts(facts.case_facts(case))
    if found.pairs and details:
        yield _pieces.folded(facts.pairs_table(found))
    if not details:
        yield _pieces.note(DETAILS_LEFT_OUT)
    yield "</article>"


def _charts(found: Evidence) -> list[str]:
    latency, search, drawn = latency_of(found), found.search, list[tuple[str, str, str]]()
    if latency is not None:
        drawn.append(("Latency", f"{latency.clock} clock", latency_chart(latency)))
    if search is not None:
        models = count_text(sum(point.pairs > 0 for point in search.front), "placement")
        drawn.append(("Search", count_text(search.total, "candidate"), search_chart(search)))
        drawn.append(("Latency against accuracy", models, front_chart(search)))
    drawn.append(("Time by layer", "ms, one profile", layers_chart(found.graph)))
    drawn += [("Baseline", name, baseline_chart(seen)) for name, seen in found.regression.items()]
    both = any(part.tuned_ms is not None for part in found.graph)
    bars = "both" if both else "unchanged" if found.status == "unchanged" else "reference"
    return [_pieces.chart(title, small, chart, bars) for title, small, chart in drawn if chart]


def _drawn_model(found: Evidence) -> str:
    """The drawing of the model with its legend; without the library that lays it out, how to get it."""
    if (drawing := model_graph(found.graph)) is None:
        return str(_pieces.note(f"The drawing of the model is left out. It needs: {INSTALL}"))
    nodes = sum(sum(part.ops.values()) for part in found.graph)
    folded = f"{count_text(nodes, 'node')} in {count_text(len(found.graph), 'part')}"
    styles = style_of(found.graph) | {"floating point": "float"}
    timed = any(part.reference_ms is not None or part.tuned_ms is not None for part in found.graph)
    return str(_pieces.drawn_model(folded, styles, *drawing, timed))


report_format = HtmlFormat()
