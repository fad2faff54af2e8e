"""Time budgets in a spec: a number, or a table by device, target or backend, of one or more percentiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from qdqspec.checks._params import Positive
from qdqspec.checks.base import longest_match
from qdqspec.registry import did_you_mean, names

ANY = "any"  # the table's entry for each device without one of its own

_PERCENTILE = re.compile(r"p(100|\d{1,2}(?:\.\d{1,3})?)")
_GLOB = re.compile(r"[*?\[]")


def _table(value: object) -> object:
    """A number, or percentiles without a device, is the budget of any device."""
    alone = not isinstance(value, dict) or (value and all(_PERCENTILE.fullmatch(str(key)) for key in value))
    return {ANY: value} if alone else value


def _known_percentiles(budget: dict[str, float]) -> dict[str, float]:
    for name in budget:
        if not _PERCENTILE.fullmatch(name):
            raise ValueError(f"'{name}' is no percentile such as p50, p99 or p99.9")
    return budget


def _known_devices(table: dict[str, Budget]) -> dict[str, Budget]:
    """Reject a misspelt backend: its budget would never apply."""
    backends = names("backend")
    for name in table:
        device = _GLOB.search(name) or any(part in backends for part in re.split(r"[- ]", name))
        if name != ANY and not device:
            near = did_you_mean(name.partition("-")[0], backends)
            raise ValueError(f"'{name}' is no backend, target or device{near}; for all others write '{ANY}'")
    return table


def _shape(value: object) -> str:
    return "percentiles" if isinstance(value, dict) else "number"


Percentiles: TypeAlias = Annotated[
    dict[str, Positive], Field(min_length=1), AfterValidator(_known_percentiles)
]
Budget: TypeAlias = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[Percentiles, Tag("percentiles")], Discriminator(_shape)
]
Table: TypeAlias = Annotated[dict[str, Budget], Field(min_length=1), AfterValidator(_known_devices)]
Budgets: TypeAlias = Annotated[
    Table, BeforeValidator(_table, json_schema_input_type=Positive | Percentiles | Table)
]


def budget_for(
    table: Mapping[str, float | dict[str, float]], target: str, device: str, percentile: float
) -> dict[float, float] | None:
    """Milliseconds by percentile for a device; ``None`` if the table has no entry for it.

    A glob over the device's key takes precedence over its target, the target over its backend, and ``any`` is
    last; of several that match, the longest applies. A plain number is the limit of the given ``percentile``.
    """
    devices = [name for name in table if name == device or (_GLOB.search(name) and fnmatchcase(device, name))]
    name = max(devices, key=len) if devices else longest_match(table, target) or ANY
    if name not in table:
        return None
    found = table[name]
    if isinstance(found, dict):
        return {float(p.removeprefix("p")): value for p, value in found.items()}
    return {percentile: found}
