"""Pages within a maximum size: details are omitted first, then the last cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdqspec._core.units import count_text

DETAILS_LEFT_OUT = (
    "Q/DQ pairs and drawings are left out, the page would be too long. The JSON report has them."
)


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
    cases = render_cases(True)
    if _size(*head, *cases, *tail) > limit_bytes:
        cases = render_cases(False)
    if _size(*head, *cases, *tail) <= limit_bytes:
        return [*head, *cases, *tail]
    room = limit_bytes - _size(*head, *tail, note(len(cases)))
    kept = 0
    while kept < len(cases) and (room := room - _size(cases[kept])) >= 0:
        kept += 1
    return [*head, *cases[:kept], note(len(cases) - kept), *tail]


def _size(*texts: str) -> int:
    return sum(len(text.encode("utf-8", "replace")) + 2 for text in texts)  # a blank line after each
