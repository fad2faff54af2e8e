"""Converts records to JSON data and back, without loss: one codec for the journal, the cache and messages of children.

A record is a dataclass whose fields are records, pydantic models, numbers, texts, paths, or tuples, sets and mappings
of these.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Record = TypeVar("_Record")

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # the validator of each kind of record
_AS_IS = frozenset({str, int, float, bool, type(None)})


def to_data(value: object) -> Any:
    """JSON data: a dataclass becomes an object with its fields, a set a list in a fixed order."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if dataclasses.is_dataclass(kind):
        return {name: to_data(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(to_data, value), key=json.dumps)
    if isinstance(value, Mapping):
        return {str(name): to_data(item) for name, item in value.items()}
    if hasattr(kind, "model_dump"):  # a pydantic model
        return kind.model_dump(value, mode="json", by_alias=True)
    return str(value) if isinstance(value, Path) else value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def from_data(kind: type[_Record], data: object) -> _Record:
    """The record of JSON data from `to_data`; absent fields get their defaults, unknown ones are ignored.

    Raises ``ValueError`` naming the first field that is missing or has a value of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        record: _Record = _ADAPTERS[kind].validate_json(json.dumps(data), strict=True)
        return record
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{where}: {problem['msg']}" if where else problem["msg"]) from None


def record_of(kind: type[_Record], named: Iterable[tuple[str, Any]], **more: Any) -> _Record:
    """A record of the ``named`` values that it has fields for, such as those of a pydantic model, and of ``more``."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a record is a dataclass
    return kind(**{name: value for name, value in named if name in names} | more)
