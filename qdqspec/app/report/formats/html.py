"""One self-contained page: no script, no other file, charts as inline SVG."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from qdqspec._core.units import count_text, plain, ratio_text
from qdqspec.app.report import facts
from qdqspec.app.report.charts import (
    baseline_chart,
    errors_chart,
    front_chart,
    latency_chart,
    layers_chart,
    search_chart,
)
from qdqspec.app.report.page import PageBlock, cases_left_out, fitted, rows_left_out
from qdqspec.app.report.runtimes import tables_of
from qdqspec.app.report.svg import INSTALL, model_graph, style_of
from qdqspec.app.report.tables import RIGHT, Table, latency_of, named_cases, verdict_word
from qdqspec.types import CaseRecord, Evidence, RunRecord

LIMIT_BYTES = 1_000_000
_STACKED = 40  # rows
_WIDE = 64  # characters of a row that does not fit beside another table
_NARROW = 40  # characters of a row that fits on a page of 400 pixels
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")  # light, dark and print
_HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quantized models</title>
<style>
{_STYLE}</style>
</head>
<body>
<main>
<h1>Quantized models</h1>"""
_LATENCY_NOTE = "Each dot is one run; the box holds the middle half, the bar is the median."
_SEARCH_NOTE = (
    "Time over the reference's, as first screened. Filled: kept as the best so far; hollow: not faster; "
    "cross: did not build or run. Dashed: the reference."
)
_FRONT_NOTE = (
    "Left is faster, up is more accurate. The line joins candidates that no other one beats in both time and SQNR; the "
    "filled dot is the selected model; grey ones are other candidates, as first screened."
)
_ERRORS_NOTE = (
    "Share of the error at the output, or before a final Softmax or the like, of each block quantized alone in its "
    "worst way. Blocks at the top are the first to keep in floating point."
)
_LAYERS_NOTE = (
    "Milliseconds of one profile in the first build, with the conversions between formats; profiles add overhead, so "
    "that their sum is not the latency."
)
_BOTH_NOTE = " Upper bar: the reference, lower bar: the selected model."
_REFERENCE_NOTE = " Bars: the reference; the selected model has no profile."
_UNCHANGED_NOTE = " Bars: the reference, which is the selected model."
_GRAPH_NOTE = (
    "From the inputs at the top to the outputs; the frame scrolls. The coloured part of a box is the share of its "
    "nodes in that format. Below: {times}its share of the error of all blocks, each quantized alone. Point at a box "
    "for more."
)
_GRAPH_TIMES = "milliseconds in the reference and in the selected model, with a bar for the reference's; and "
_SYMBOLS = {"FAIL": "\u2717", "WARN": "!", "inconclusive": "?", "pass": "\u2713"}
_MOST_FAILURES = 50
_BASELINE_NOTE = (
    "Time over the reference's with its 95 % interval. Dashed: the baseline that this run is compared with."
)


class HtmlFormat:
    """An HTML page for light and dark screens, and for print."""

    suffix = ".html"

    def render(self, record: RunRecord) -> str:
        """The whole page, below 1 MB."""
        cases = named_cases(record.cases)
        head = [
            _HEAD,
            f'<p class="lead">{_e(facts.run_line(record))}</p>',
            *_failures(cases),
            _summary(record),
            *(_runtimes(table, lines) for table, lines in tables_of(record)),
        ]
        blocks = [_case_blocks(case, name, index) for index, (case, name) in enumerate(cases)]
        tail = ["</main>\n</body>\n</html>"]
        return "\n".join(fitted(head, blocks, tail, LIMIT_BYTES, lambda n: _note(cases_left_out(n)))) + "\n"


def _e(text: str) -> str:
    """Escape text for HTML."""
    return escape(plain(text))


# ---- the head ------------------------------------------------------------------------------------


def _failures(cases: Sequence[tuple[CaseRecord, str]]) -> list[str]:
    """All failed checks, before everything else."""
    rows = [
        f"<tr><td>{_badge(word)}</td>"
        f'<td><a href="#case-{index}">{_e(name)}</a>: {_e(check)}</td><td>{_e(headline)}</td></tr>'
        for index, (case, name) in enumerate(cases)
        for word, check, headline in facts.checks_table(case).rows
        if word == "FAIL"
    ]
    if not rows:
        return []
    more = len(rows) - _MOST_FAILURES
    left = _note(f"and {count_text(more, 'more failed check')}") if more > 0 else ""
    title = f"<h2>{count_text(len(rows), 'failed check')}</h2>"
    return [f'<div class="card failures">{title}{_checks_table(rows[:_MOST_FAILURES])}{left}</div>']


def _summary(record: RunRecord) -> str:
    if not record.cases:
        return '<p class="card">No case was run.</p>'
    shown = record.cases[: facts.MAX_ROWS]
    failed = [
        index
        for index, case in enumerate(shown)
        if any(verdict_word(result) == "FAIL" for result in case.results)
    ]
    anchors = [f"case-{index}" for index in range(len(shown))]
    table = _table(facts.summary(record), "summary", anchors=anchors, failed=failed)
    return f'<div class="card">{table}</div>'


def _runtimes(table: Table, lines: Sequence[str]) -> str:
    """A comparison of runtimes as a card."""
    paragraphs = "".join(f"<p>{_e(line)}</p>" for line in lines)
    return f'<div class="card"><h3>{_title(table)}</h3>\n{_table(table)}{paragraphs}</div>'


# ---- a case --------------------------------------------------------------------------------------


def _case_blocks(case: CaseRecord, name: str, index: int) -> list[PageBlock]:
    found = case.evidence
    warnings = "".join(f'<p class="warning">{_e(plain(w, facts.LONG))}</p>' for w in found.warnings)
    return [
        PageBlock(f'<article class="card" id="case-{index}">\n{_heading(case, name)}{warnings}'),
        PageBlock(_checks(case)),
        PageBlock('<div class="charts">'),
        *_charts(found),
        PageBlock("</div>"),
        *_graph(found),
        PageBlock('<div class="tables">'),
        *map(_section, facts.case_tables(found)),
        PageBlock("</div>"),
        *_details(case),
        PageBlock("</article>"),
    ]


def _heading(case: CaseRecord, name: str) -> str:
    status, latency = case.evidence.status, case.evidence.latency
    gain = ""
    if status in ("unchanged", "untimed", "skipped"):
        gain = f'<div class="gain alone">{status}</div>'
    elif latency is not None and "tuned" in latency.samples:
        gain = f'<div class="gain">{ratio_text(latency.speedup.median)}&times;</div>'
    paragraphs = "".join(f"<p>{_e(line)}</p>" for line in facts.lead_lines(case))
    return f'<div class="head"><div><h2>{_e(name)}</h2>{paragraphs}</div>{gain}</div>'


def _checks(case: CaseRecord) -> str:
    order = list(_SYMBOLS)
    rows = sorted(facts.checks_table(case).rows, key=lambda row: order.index(row[0]))
    notes = {name: f'<div class="advice">{_e(text)}</div>' for name, text in facts.advice_rows(case)}
    body = [
        f"<tr><td>{_badge(word)}</td><td>{_e(name)}</td><td>{_e(headline)}{notes.get(name, '')}</td></tr>"
        for word, name, headline in rows
    ]
    return _checks_table(body) if body else ""


def _checks_table(rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<table class="checks"><tbody>\n{body}\n</tbody></table>'


def _badge(word: str) -> str:
    return f'<span class="badge {word}">{_SYMBOLS[word]} {word}</span>'


def _charts(found: Evidence) -> list[PageBlock]:
    latency, search = latency_of(found), found.search
    made = []
    if latency is not None:
        made.append(("Latency", f"{latency.clock} clock", latency_chart(latency), _LATENCY_NOTE))
    if search is not None:
        models = count_text(sum(point.pairs > 0 for point in search.front), "placement")
        made += [
            ("Search", count_text(search.total, "candidate"), search_chart(search), _SEARCH_NOTE),
            ("Latency against accuracy", models, front_chart(search), _FRONT_NOTE),
            ("Error by block", "one quantized at a time", errors_chart(search), _ERRORS_NOTE),
        ]
    both = any(part.tuned_ms is not None for part in found.graph)
    alone = _UNCHANGED_NOTE if found.status == "unchanged" else _REFERENCE_NOTE
    note = _LAYERS_NOTE + (_BOTH_NOTE if both else alone)
    made.append(("Time by layer", "one profile", layers_chart(found.graph), note))
    made += [
        ("Baseline", name, baseline_chart(seen), _BASELINE_NOTE) for name, seen in found.regression.items()
    ]
    return [
        PageBlock(
            f"<figure><h3>{title} <small>{_e(small)}</small></h3>\n{chart}\n"
            f"<figcaption>{caption}</figcaption></figure>",
            brief=_note(f"The chart of the {title.lower()} is left out: the page would be too long."),
        )
        for title, small, chart, caption in made
        if chart
    ]


def _graph(found: Evidence) -> list[PageBlock]:
    """The drawing of the model with its legend; without the library that lays it out, how to get it."""
    if not found.graph:
        return []
    drawing = model_graph(found.graph)
    if drawing is None:
        return [PageBlock(_note(f"The drawing of the model is left out. It needs: {INSTALL}"))]
    nodes = sum(sum(part.ops.values()) for part in found.graph)
    folded = f"{count_text(nodes, 'node')} in {count_text(len(found.graph), 'part')}"
    styles = style_of(found.graph) | {"floating point": "float"}
    legend = "".join(f'<span><i class="{style}"></i>{_e(name)}</span>' for name, style in styles.items())
    timed = any(part.reference_ms is not None or part.tuned_ms is not None for part in found.graph)
    note = _GRAPH_NOTE.format(times=_GRAPH_TIMES if timed else "")
    drawn = (
        f'<figure class="drawn"><h3>Model <small>{folded}</small></h3>\n<p class="legend">{legend}</p>\n'
        f'<div class="graph" tabindex="0"><i class="start" style="--from: {drawing.start:.0f}px"></i>'
        f"{drawing.svg}</div>\n<figcaption>{note}</figcaption></figure>"
    )
    return [PageBlock(drawn, _note("The drawing of the model is left out: the page would be too long."))]


def _section(table: Table) -> PageBlock:
    style = ' class="wide"' if _characters(table) > _WIDE else ""
    section = f"<section{style}><h3>{_title(table)}</h3>\n{_table(table)}</section>"
    return PageBlock(section, brief=_note(rows_left_out(table)))


def _details(case: CaseRecord) -> list[PageBlock]:
    listed = "\n".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in facts.case_facts(case))
    blocks = [_folded("Search and device", f"<dl>{listed}</dl>", "Search and device left out.")]
    if case.evidence.pairs:
        pairs = facts.pairs_table(case.evidence)
        blocks.append(_folded(f"{pairs.title}: {len(pairs.rows)}", _table(pairs), rows_left_out(pairs)))
    return blocks


# ---- elements ------------------------------------------------------------------------------------


def _table(
    table: Table, style: str = "", *, anchors: Sequence[str] = (), failed: Collection[int] = ()
) -> str:
    """The table; ``anchors`` are the link targets of the rows' first cells, ``failed`` the rows marked as such."""
    kinds = [' class="number"' if side == RIGHT else "" for side in table.align]
    heads = "".join(f"<th{kind}>{_e(head)}</th>" for kind, head in zip(kinds, table.headers, strict=True))
    # On a narrow screen the cells of a wide table are stacked, each with its head; one of many rows scrolls.
    stacks = _characters(table) > _NARROW and len(table.rows) <= _STACKED
    names = [f' data-head="{_e(head)}"' if stacks else "" for head in table.headers]
    rows = []
    for number, (row, anchor) in enumerate(zip_longest(table.rows, anchors)):
        cells = [_e(text) for text in row]
        if number in failed:
            cells[-1] = f'<span class="FAIL">{_SYMBOLS["FAIL"]} {cells[-1]}</span>'
        if anchor:
            cells[0] = f'<a href="#{anchor}">{cells[0].replace("::", "::<wbr>")}</a>'
        marked = zip(kinds, names, cells, strict=True)
        rows.append("".join(f"<td{kind}{name}>{cell}</td>" for kind, name, cell in marked))
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    styles = f"{style} stack{' long' if _characters(table) > _WIDE else ''}".strip() if stacks else style
    return (
        f'<div class="scroll"><table class="{styles}">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _characters(table: Table) -> int:
    """The characters of its widest row."""
    columns = zip(table.headers, *table.rows, strict=True)
    return sum(max(map(len, cells)) for cells in columns)


def _title(table: Table) -> str:
    """The title, with its last parentheses in small type."""
    name, _, small = table.title.partition(" (")
    return f"{_e(name)} <small>{_e(small.removesuffix(')'))}</small>" if small else _e(name)


def _folded(title: str, body: str, brief: str) -> PageBlock:
    return PageBlock(f"<details><summary>{_e(title)}</summary>\n{body}\n</details>", _note(brief))


def _note(text: str) -> str:
    return f'<p class="note">{_e(text)}</p>'


report_format = HtmlFormat()
