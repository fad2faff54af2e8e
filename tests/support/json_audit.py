"""Checks that the JSON of a verb contains all numbers, names and sentences of its terminal output.

The JSON of each verb has the terminal output in ``text``, which must be contained in the other fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SCALES = {"%": 100, "KiB": 2**-10, "MiB": 2**-20, "GiB": 2**-30, "million": 1e-6}
_NUMBER = re.compile(
    r"(?<![\w./:%-])(?P<bound>at (?:least|most) )?[+-]?(?P<digits>\d+(?:,\d{3})*(?:\.(?P<decimals>\d+))?)"
    r"(?P<unit>x\b| ?%| (?:[KMG]iB|million)\b)?(?![\w/:]|[.-]\w)"
)
_TIME = re.compile(r"\b(?:\d+ d(?: \d+ h)?|(?:\d+ h )?\d+ min(?: \d+ s)?|\d+ h)(?!\w)")
_NAME = re.compile(r"[\w/.#:-]*[\w/#]")
# Statements about the display itself, and constants of the method.
_DISPLAY = re.compile(
    r"\(--verbose shows all\)|and \d+ (?:more|smaller)|\d+ smaller differences are left out\.|the other \d+|95 %"
)
_PROSE = re.compile(r"(?:note|warning|fail): |[A-Z].*[a-z]\.$")


def audit(data: Mapping[str, Any], err: str) -> None:
    """Assert that the data contains the numbers, names and sentences of the text and of standard error.

    Progress lines are excluded, and the JSON Schema of ``schema``, which is the terminal output itself.
    A number is in the data if rounding to its decimals results in the same: a share for a percentage, bytes for KiB.
    A bound, "at least 1.05x", may be rounded down or up. Times in words, "3 min 20 s", are not compared.
    A number or name that is part of a string of the data counts as well.
    """
    if "$defs" in data:
        return
    if "error" in data:
        assert data["error"] in err
        assert all(line in err for line in (data["cure"] or "").splitlines())
        return
    notes = [line for line in err.splitlines() if not line.startswith("[qdqspec]")]
    values = list(_leaves({name: value for name, value in data.items() if name != "text"}))
    everything = "\n".join(" ".join(value.split()) for value in values if isinstance(value, str))
    numbers = [abs(float(v)) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    words = set(re.split(r"[\s,;:()\[\]<>|]+", everything))
    lost = []
    for line in map(" ".join, map(str.split, [*data["text"].splitlines(), *notes])):
        plain = re.sub(r"^(?:note|warning|fail|cure|qdqspec): (?:[\w/.-]+::[\w.:-]+(?: - |: ))?", "", line)
        if plain and plain in everything:
            continue
        if _PROSE.match(line) and not _DISPLAY.search(line):
            lost.append(line)
            continue
        rest = _TIME.sub("", _DISPLAY.sub("", line))
        lost += [m[0] for m in _NUMBER.finditer(rest) if not (m[0] in words or _is_there(m, numbers))]
        lost += [name for name in _names(rest) if name not in everything]
    assert lost == []


def _is_there(match: re.Match[str], numbers: list[float]) -> bool:
    scale = _SCALES.get((match["unit"] or "").strip(), 1)
    wanted, decimals = float(match["digits"].replace(",", "")), len(match["decimals"] or "")
    near = (1 if match["bound"] else 0.5001) * 10.0**-decimals
    return any(math.isclose(scale * n, wanted, abs_tol=near, rel_tol=0) for n in numbers)


def _names(line: str) -> Iterator[str]:
    """Names of nodes, tensors, files and cases: words with a slash, a colon or an underscore, unless truncated."""
    for match in _NAME.finditer(line):
        word = match[0].strip(".:-")
        is_name = "/" in word or "::" in word or "_" in word
        if is_name and "..." not in word and not re.fullmatch(r"\d+/\d+|Q/DQ|direct/all", word):
            yield re.sub(r":\d+$", "", word)


def _leaves(value: Any) -> Iterator[Any]:
    """All values, keys, and lengths of lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, list):
        yield len(value)
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
