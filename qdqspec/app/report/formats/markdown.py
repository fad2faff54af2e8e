"""Markdown for pull requests and job summaries."""

from __future__ import annotations

import re

from tabulate import tabulate

from qdqspec._core.units import plain
from qdqspec.app.report import facts
from qdqspec.app.report.compare import conclusions, runtimes_table
from qdqspec.app.report.formats import DETAILS_LEFT_OUT, cases_left_out, fit_page
from qdqspec.app.report.tables import Table, named_cases
from qdqspec.types import CaseRecord, RunRecord

LIMIT_BYTES = 900_000  # GitHub limits job summaries to 1 MiB, and several steps may share one page
_SPECIAL = re.compile(r"^[-+=]|[\\`*_\[\]<>|~&$@#]|(?<=:)/(?=/)|(?<=www)\.")


class MarkdownFormat:
    """The summary table, then each case. Details are omitted first if the page is too long."""

    suffix = ".md"

    def render(self, record: RunRecord) -> str:
        """The whole page, below 900 kB."""
        head = [
            "# Quantized models",
            escape(facts.run_line(record)),
            _table(facts.summary(record)) if record.cases else "No case was run.",
        ]
        for found in record.runtimes:
            table = runtimes_table(found)
            listed = "\n".join(f"- {escape(line)}" for line in conclusions(found))
            head.append(f"**{escape(table.title)}**\n\n{_table(table)}\n\n{listed}")

        def render_cases(details: bool) -> list[str]:
            return [_case_text(case, name, details=details) for case, name in named_cases(record.cases)]

        return "\n\n".join(fit_page(head, render_cases, [], LIMIT_BYTES, cases_left_out)) + "\n"


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


def _case_text(case: CaseRecord, name: str, *, details: bool) -> str:
    found = case.evidence
    texts = [f"## {escape(name)}", *map(escape, facts.lead_lines(case))]
    texts += [f"> {escape(plain(warning, facts.LONG))}" for warning in found.warnings]
    checks = facts.checks_table(case)
    texts += [_table(checks)] if checks.rows else []
    advice = "\n".join(f"- {escape(name)}: {escape(text)}" for name, text in facts.advice_rows(case))
    texts += [advice] if advice else []
    texts += [f"**{escape(table.title)}**\n\n{_table(table)}" for table in facts.case_tables(found)]
    listed = "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in facts.case_facts(case))
    texts.append(_folded("Search and device", listed))
    if found.pairs and details:
        pairs = facts.pairs_table(found)
        texts.append(_folded(f"{pairs.title}: {len(pairs.rows)}", _table(pairs)))
    texts += [] if details else [DETAILS_LEFT_OUT]
    return "\n\n".join(texts)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


report_format = MarkdownFormat()
