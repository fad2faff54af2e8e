"""Report formats, one file each, found by name: a run record in, text or bytes out. Pages have a maximum size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qdqspec._core.units import count_text
from qdqspec.types import RunRecord

DETAILS_LEFT_OUT = (
    "Q/DQ pairs and drawings are left out, the page would be too long. The JSON report has them."
)


class ReportFormat(Protocol):
    """Renders a record. Pure: the same record gives the same bytes."""

    suffix: str  # with the dot; selects the format of --qdq-report=PATH

    def render(self, record: RunRecord) -> str | bytes:
        """Return the whole report."""
        ...


def cases_left_out(cases: int) -> str:
    """The text in place of the last cases of a page that is too long."""
    return f"{count_text(cases, 'more case')} left out: the page would be too long. The JSON report has all."


def fit_page(
    head: Sequence[str],
    render_cases: Callable[[bool], Sequence[str]],
    tail: Sequence[str],
    limit_bytes: int,
    note: Callable[[int], str],
) -> list[str]:
    """The texts of a page within the limit.

    ``render_cases`` gives one text for each case, with details or without; ``note(n)`` reports ``n`` omitted cases.
    """

    def size(*texts: str) -> int:
        return sum(len(text.encode("utf-8", "replace")) + 2 for text in texts)  # a blank line after each

    cases = render_cases(True)
    if size(*head, *cases, *tail) > limit_bytes:
        cases = render_cases(False)
    if size(*head, *cases, *tail) <= limit_bytes:
        return [*head, *cases, *tail]
    room = limit_bytes - size(*head, *tail, note(len(cases)))
    kept = 0
    while kept < len(cases) and (room := room - size(cases[kept])) >= 0:
        kept += 1
    return [*head, *cases[:kept], note(len(cases) - kept), *tail]
