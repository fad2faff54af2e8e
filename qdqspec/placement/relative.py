"""Schemes: the Q/DQ pairs of one region, relative to its pattern.

Schemes are independent of models: `qdqspec.placement.carry` finds the edges of a scheme in one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from qdqspec.errors import PlacementError

PlaceKind: TypeAlias = Literal["in", "out", "result"]
_KINDS: dict[str, PlaceKind] = {"in": "in", "out": "out", "result": "result"}


class PatternPlace(NamedTuple):
    """A place in a pattern, by the canonical index of a node and a slot of it.

    ``in``: that input of the node. ``out``: that output, for all readers. ``result``: that output as an output
    of the model; ignored where it is not one.
    """

    kind: PlaceKind
    node: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RelativeSite:
    """A pair at a place, like `qdqspec.types.Site` without names."""

    place: PatternPlace
    format: str
    axis: int = -1  # -1: one scale for the whole tensor
    weight: bool = False

    def __str__(self) -> str:
        kind, node, slot = self.place
        axis = f"/{self.axis}" if self.axis >= 0 else ""
        return f"{kind}{node}.{slot}={'w:' if self.weight else ''}{self.format}{axis}"


_WRITTEN = re.compile(
    r"(in|out|result)([0-9]{1,9})\.([0-9]{1,9})=(w:)?([a-z][a-z0-9_]{0,31})(?:/([0-9]{1,3}))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The pairs of one region. Equal sites are the same scheme, in any order."""

    sites: frozenset[RelativeSite] = frozenset()

    def __str__(self) -> str:
        """``in0.0=uint8 in0.1=w:int8/0 out2.0=uint8``; `parse_scheme` is the inverse."""
        return " ".join(map(str, sorted(self.sites)))

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def distance(self, other: Scheme) -> int:
        """Number of sites in which two schemes differ: the size of their symmetric difference."""
        return len(self.sites ^ other.sites)


def scheme(sites: Iterable[RelativeSite]) -> Scheme:
    """The scheme of these sites."""
    return Scheme(sites=frozenset(sites))


def parse_scheme(text: str) -> Scheme:
    """The scheme of a text from ``str``. Raises `PlacementError` quoting the word that is not a site."""
    sites = []
    for word in text.split():
        match = _WRITTEN.fullmatch(word)
        if match is None:
            raise PlacementError(
                f"'{word[:60]}' is not a site", cure="a site is written like in0.1=w:int8/0 or out3.0=uint8"
            )
        kind, node, slot, weight, fmt, axis = match.groups()
        site = RelativeSite(
            place=PatternPlace(_KINDS[kind], int(node), int(slot)),
            format=fmt,
            axis=-1 if axis is None else int(axis),
            weight=weight is not None,
        )
        sites.append(site)
    return scheme(sites)
