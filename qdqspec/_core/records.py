"""Converts records to JSON data and back, without loss, and reads untrusted JSON strictly.

A record is a dataclass whose fields are records, pydantic models, numbers, texts, paths, or tuples, sets and mappings
of these. The journal, the cache and messages of child processes consist of records.

Any bytes give data or a ``ValueError``. Input that Python's own reader accepts and other readers do not
(duplicate keys, NaN, numbers out of range, unpaired surrogates, unlimited nesting) is rejected here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Record = TypeVar("_Record")

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # the validator of each kind of record
_MOST_PARTS = 5_000_000  # objects and lists: each takes some twenty times the memory of its text
_AS_IS = frozenset({str, int, float, bool, type(None)})
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # some of which are unpaired surrogates


def to_data(value: object) -> Any:
    """JSON data: a dataclass becomes an object with its fields, a set a list in a fixed order."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if dataclasses.is_dataclass(kind):
        named = (field.name for field in dataclasses.fields(kind) if field.init)
        return {name: to_data(getattr(value, name)) for name in named}
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(to_data, value), key=json.dumps)
    if isinstance(value, Mapping):
        return {str(name): to_data(item) for name, item in value.items()}
    if hasattr(kind, "model_dump"):  # a pydantic model
        return kind.model_dump(value, mode="json", by_alias=True)
    return str(value) if isinstance(value, Path) else value


def from_data(kind: type[_Record], data: object) -> _Record:
    """The record of JSON data from `to_data`; absent fields get their defaults, unknown ones are ignored.

    Raises ``ValueError`` naming the first field that is missing or has a value of another type.
    """
    from pydantic import TypeAdapter

    try:
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        record: _Record = _ADAPTERS[kind].validate_json(json.dumps(data), strict=True)
        return record
    except ValueError as error:
        raise ValueError(problem_text(error)) from None


def problem_text(error: ValueError, whole: str = "") -> str:
    """The message of an error; of pydantic's the first problem after its place, or after ``whole``."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"])) or whole
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def record_of(kind: type[_Record], named: Iterable[tuple[str, Any]], **more: Any) -> _Record:
    """A record of the ``named`` values that it has fields for, such as those of a pydantic model, and of ``more``."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a record is a dataclass
    return kind(**{name: value for name, value in named if name in names} | more)


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
        text = data.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
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
        ((again, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {again!r:.40} occurs twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is no number of JSON or too large")
    return value
