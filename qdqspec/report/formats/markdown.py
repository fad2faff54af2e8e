"""Markdown for pull requests and job summaries."""

from __future__ import annotations

import re

from tabulate import tabulate

from qdqspec.report import facts
from qdqspec.report.names import distinct_names
from qdqspec.report.page import Page, PageBlock, case_tables, cases_left_out, fitted, rows_left_out
from qdqspec.report.runtimes import tables_of
from qdqspec.report.tables import provenance_text
from qdqspec.types import CaseRecord, RunRecord
from qdqspec.units import plain

LIMIT_BYTES = 900_000  # GitHub limits job summaries to 1 MiB, and several steps may share one page
_SPECIAL = re.compile(r"^[-+=]|[\\`*_\[\]<>|~&$@#]|(?<=:)/(?=/)|(?<=www)\.")


class MarkdownFormat:
    """The summary table, then each case. The largest tables are omitted first if the page is too long."""

    suffix = ".md"

    def render(self, record: RunRecord) -> str:
        """The whole page, below 900 kB."""
        page = Page(
            head=[
                PageBlock("# Quantized models"),
                PageBlock(escape(facts.run_line(record))),
                _summary(record),
                *_runtimes(record),
            ],
            cases=[
                _case_blocks(case, name)
                for case, name in zip(record.cases, distinct_names(record.cases), strict=True)
            ],
        )
        return "\n\n".join(fitted(page, LIMIT_BYTES, cases_left_out)) + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown, inside tables too."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], plain(text))


def _table(table: facts.Table) -> str:
    return tabulate(
        [[escape(cell) for cell in row] for row in table.rows],
        headers=[escape(head) for head in table.headers],
        colalign=["right" if side == "r" else "left" for side in table.align],
        tablefmt="pipe",
        disable_numparse=True,
    )


def _summary(record: RunRecord) -> PageBlock:
    if not record.cases:
        return PageBlock("No case was run.")
    return PageBlock(_table(facts.summary(record)))


def _runtimes(record: RunRecord) -> list[PageBlock]:
    """The comparisons of runtimes."""
    blocks = []
    for table, lines in tables_of(record):
        said = "\n".join(f"- {escape(line)}" for line in lines)
        rows = [_table(table)] if table.rows else []
        text = "\n\n".join([f"**{escape(table.title)}**", *rows, said])
        blocks.append(PageBlock(text, brief=_left_out(table)))
    return blocks


def _case_blocks(case: CaseRecord, name: str) -> list[PageBlock]:
    found = case.evidence
    heading = f"## {escape(name)}"
    title = escape(plain(found.case.title, facts.LONG))
    older = provenance_text(case)
    blocks = [
        PageBlock(heading),
        *([PageBlock(title)] if title else []),
        PageBlock(escape(facts.gain_line(case))),
    ]
    if older:
        blocks.append(PageBlock(f"{escape(older.capitalize())}."))
    blocks += [PageBlock(f"> {escape(plain(warning, facts.LONG))}") for warning in found.warnings]
    blocks += _checks(case)
    for table in case_tables(found):
        text = f"**{escape(table.title)}**\n\n{_table(table)}"
        blocks.append(PageBlock(text, brief=_left_out(table)))
    return [*blocks, *_details(case)]


def _checks(case: CaseRecord) -> list[PageBlock]:
    rows = facts.check_rows(case)
    if not rows:
        return []
    table = facts.Table("Checks", ("verdict", "check", "result"), rows)
    advice = [f"- {escape(name)}: {escape(text)}" for name, text in facts.advice_rows(case)]
    return [PageBlock(_table(table)), *([PageBlock("\n".join(advice))] if advice else [])]


def _details(case: CaseRecord) -> list[PageBlock]:
    listed = "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in facts.case_facts(case))
    blocks = [_folded("Search and device", listed, brief="Search and device are left out.")]
    pairs = facts.pairs_table(case.evidence)
    if pairs is not None:
        title = f"{pairs.title}: {len(pairs.rows)}"
        blocks.append(_folded(title, _table(pairs), brief=_left_out(pairs)))
    return blocks


def _folded(title: str, body: str, *, brief: str) -> PageBlock:
    return PageBlock(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>", brief)


def _left_out(table: facts.Table) -> str:
    return escape(rows_left_out(table))


report_format = MarkdownFormat()
