"""Text for a terminal: words in colour, and tables within its width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from qdqspec._core.units import count_text, plain, wrapped

_LEAST = 20  # characters of a column that is cut
_RULE = re.compile(r" *-+(?:  -+)+")
_EXCERPT = re.compile(r" *\d* \| ")  # a line of a file with its number, or the mark below it
_RED, _YELLOW, _GREEN = "\x1b[31m", "\x1b[33m", "\x1b[32m"
_COLORS = (
    (re.compile(r"\bFAIL\b|^fail:|^qdqspec: (?=\S)|\brefused\b", re.MULTILINE), _RED),
    (re.compile(r"\bWARN\b|^warning:|\binconclusive\b|\bslower\b", re.MULTILINE), _YELLOW),
    (re.compile(r"\b\d+ passed\b|\bfaster\b"), _GREEN),
)


def wants_color(choice: str, environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to write colours: by ``always`` or ``never``, else by NO_COLOR, FORCE_COLOR and the terminal."""
    if choice != "auto":
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or (is_terminal and environment.get("TERM") != "dumb")


def color_words(text: str) -> str:
    """The text with failures in red, warnings and undecided checks in yellow, passes in green."""
    for pattern, color in _COLORS:
        text = pattern.sub(color + r"\g<0>" + "\x1b[0m", text)
    return text


def narrow_tables(text: str, width: int) -> str:
    """The text with tables of at most ``width`` characters.

    The widest columns are cut in the middle of their cells; where too little of them would remain, the last columns are
    left out.
    """
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        if _RULE.fullmatch(lines[at]) is None:
            at += 1
            continue
        spans = [match.span() for match in re.finditer("-+", lines[at])]
        end = at + 1
        while end < len(lines) and _is_row(lines[end], spans):
            end += 1
        start = at - 1 if at and _is_row(lines[at - 1], spans) else at
        if max(map(len, lines[start:end])) > width:
            lines[start:end] = _narrowed(lines[start:end], spans, width)
        at = end
    return "\n".join(lines)


def fit_to_width(text: str, width: int) -> str:
    """The text for a terminal of this width: tables are cut, and other lines broken between words.

    Text for copying is not broken: a line after one that ends with a colon, and excerpts of files.
    """
    lines = narrow_tables(text, width).split("\n")
    whole = (before.endswith(":") or _EXCERPT.match(line) for before, line in pairwise(["", *lines]))
    return "\n".join(line if keep else wrapped(line, width) for keep, line in zip(whole, lines, strict=True))


def _is_row(line: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the line has cells in these columns: spaces between them, and something in one of them."""
    gaps = [(end, begin) for (_, end), (begin, _) in pairwise([(0, 0), *spans])]
    return bool(line.strip()) and all(not line[end:begin].strip() for end, begin in gaps)


def _narrowed(lines: Sequence[str], spans: Sequence[tuple[int, int]], width: int) -> list[str]:
    indent = spans[0][0]
    cells = [[line[begin:end] for begin, end in spans[:-1]] + [line[spans[-1][0] :]] for line in lines]
    filled = [row for row in cells if set("".join(row)) != {"-"}] or cells
    widths = [max(len(cell.strip()) for cell in column) for column in zip(*filled, strict=True)]
    count = len(widths)
    while indent + sum(min(w, _LEAST) for w in widths[:count]) + 2 * (count - 1) > width and count > 2:
        count -= 1
    left_out, widths = len(widths) - count, widths[:count]
    while indent + sum(widths) + 2 * (count - 1) > width and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    shown = [
        " " * indent + "  ".join(_cell(cell, w) for cell, w in zip(row, widths, strict=False)).rstrip()
        for row in cells
    ]
    note = f"{count_text(left_out, 'column')} left out: widen the terminal"
    return [*shown, " " * indent + note] if left_out else shown


def _cell(cell: str, width: int) -> str:
    if len(cell) <= width:
        return cell.ljust(width)
    if set(cell) == {"-"}:
        return cell[:width]
    shown = plain(cell.strip(), width)
    return shown.rjust(width) if cell.startswith(" ") else shown.ljust(width)
