"""Markdown for pull requests and job summaries."""

from __future__ import annotations

import re

from tabulate import tabulate

from qdqspec._core.units import plain
from qdqspec.app.report import facts
from qdqspec.app.report.page import PageBlock, cases_left_out, fit_page, rows_left_out
from qdqspec.app.report.runtimes import tables_of
from qdqspec.app.report.tables import Table, named_cases
from qdqspec.types import CaseRecord, RunRecord

LIMIT_BYTES = 900_000  # GitHub limits job summaries to 1 MiB, and several steps may share one page
_SPECIAL = re.compile(r"^[-+=]|[\\`*_\[\]<>|~&$@#]|(?<=:)/(?=/)|(?<=www)\.")


class MarkdownFormat:
    """The summary table, then each case. The largest tables are omitted first if the page is too long."""

    suffix = ".md"

    def render(self, record: RunRecord) -> str:
        """The whole page, below 900 kB."""
        head = [
            "# Quantized models",
            escape(facts.run_line(record)),
            _table(facts.summary(record)) if record.cases else "No case was run.",
        ]
        for table, lines in tables_of(record):
            listed = "\n".join(f"- {escape(line)}" for line in lines)
            head.append(f"**{escape(table.title)}**\n\n{_table(table)}\n\n{listed}")
        cases = [_case_blocks(case, name) for case, name in named_cases(record.cases)]
        return "\n\n".join(fit_page(head, cases, [], LIMIT_BYTES, cases_left_out)) + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown, inside tables too."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], plain(text))


def _table(table: Table) -> str:
    return tabulate(
        [[escape(cell) for cell in row] for row in table.rows],
        headers=[escape(head) for head in table.headers],
        colalign=table.align,
        tablefmt="pipe",
        disable_numparse=True,
    )


def _case_blocks(case: CaseRecord, name: str) -> list[PageBlock]:
    found = case.evidence
    texts = [f"## {escape(name)}", *map(escape, facts.lead_lines(case))]
    texts += [f"> {escape(plain(warning, facts.LONG))}" for warning in found.warnings]
    checks = facts.checks_table(case)
    texts += [_table(checks)] if checks.rows else []
    advice = "\n".join(f"- {escape(name)}: {escape(text)}" for name, text in facts.advice_rows(case))
    texts += [advice] if advice else []
    tables = [
        PageBlock(f"**{escape(table.title)}**\n\n{_table(table)}", brief=escape(rows_left_out(table)))
        for table in facts.case_tables(found)
    ]
    listed = "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in facts.case_facts(case))
    details = [_folded("Search and device", listed, brief="Search and device are left out.")]
    if found.pairs:
        pairs = facts.pairs_table(found)
        title = f"{pairs.title}: {len(pairs.rows)}"
        details.append(_folded(title, _table(pairs), brief=escape(rows_left_out(pairs))))
    return [*map(PageBlock, texts), *tables, *details]


def _folded(title: str, body: str, *, brief: str) -> PageBlock:
    return PageBlock(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>", brief)


report_format = MarkdownFormat()
