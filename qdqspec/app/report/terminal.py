"""Words in colour for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
