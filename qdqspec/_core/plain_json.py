"""Strict reader for untrusted JSON.

Any bytes give data or a ``ValueError``. Input that Python's own reader accepts and other readers do not
(duplicate keys, NaN, numbers out of range, unpaired surrogates, unlimited nesting) is rejected here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

_MOST_PARTS = 5_000_000  # objects and lists: each takes some twenty times the memory of its text
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # some of which are unpaired surrogates


class TooLargeError(ValueError):
    """The text is larger than any valid one."""


def read_json(path: Path, *, most_bytes: int) -> Any:
    """The content of a JSON file. Raises ``ValueError`` stating the problem, ``OSError`` if it cannot be read."""
    size = path.stat().st_size
    if size > most_bytes:
        raise TooLargeError(f"it has {size:,} bytes, and at most {most_bytes:,} are expected")
    return parse_json(path.read_bytes())


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ``ValueError`` stating the problem."""
    if data.count(b"{") + data.count(b"[") > _MOST_PARTS:
        raise TooLargeError(f"it has more than {_MOST_PARTS:,} parts")
    try:
        found = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_float,
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if _HALF_PAIR.search(data):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text in it is no Unicode") from None
    return found


def content_sum(content: object) -> str:
    """A checksum of JSON data, sixteen hexadecimal digits, independent of key order and white space."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # add gives None
        raise ValueError(f"the key {again!r:.40} occurs twice")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.20} is too large")
    return value
