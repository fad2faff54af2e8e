"""Records of Q/DQ placements: sites, placements, and the regions they belong to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from qdqspec.types.words import Label, RegionType

_row_of = attrgetter("row")


class Consumer(NamedTuple):
    """The end of an edge: input ``input`` of node ``node``; of no node (``""``), the graph output of that number.

    No node has an empty name: unnamed nodes are called ``OpType#n``.
    """

    node: str
    input: int

    @property
    def is_output(self) -> bool:
        """Whether this is a graph output."""
        return not self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One Q/DQ pair: a tensor, the consumers that read it quantized, and the number format.

    ``axis`` is set if scales are per channel (weights). ``weight`` marks a constant tensor. Tensor and node
    names are those of the model without Q/DQ. ``row`` is the site as a line of JSON.
    """

    tensor: str
    consumers: tuple[Consumer, ...]
    format: str
    axis: int | None = None
    weight: bool = False
    row: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = tuple(sorted(Consumer(*c) for c in self.consumers))
        row = json.dumps([self.tensor, [list(c) for c in ends], self.format, self.axis, self.weight])
        object.__setattr__(self, "consumers", ends)
        object.__setattr__(self, "row", row)

    def __hash__(self) -> int:
        """Hash of the row, which Python caches: placements hold tens of thousands of sites."""
        return hash(self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The Q/DQ pairs of a whole model. Equal sites are the same placement, whatever the labels.

    ``labels`` holds the label of each unit that is not in float, by the unit's id. ``given`` marks the pairs of a model
    that is a candidate as it was given, with its own numbers.
    """

    sites: frozenset[Site]
    labels: tuple[tuple[str, Label], ...] = field(default=(), compare=False)
    given: bool = False
    _ordered: tuple[Site, ...] = field(default=(), init=False, repr=False, compare=False)
    _digest: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.sites, key=_row_of))
        rows = "\n".join([*(["given"] if self.given else ()), *(site.row for site in ordered)])
        object.__setattr__(self, "_ordered", ordered)
        object.__setattr__(self, "_digest", hashlib.sha256(rows.encode()).hexdigest()[:16])

    @classmethod
    def of_digest(cls, digest: str) -> Placement:
        """A placement of which only the digest is known, as in a record."""
        placement = cls(sites=frozenset())
        object.__setattr__(placement, "_digest", digest)
        return placement

    @property
    def ordered(self) -> tuple[Site, ...]:
        """The sites in a canonical order."""
        return self._ordered

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return self._digest

    @property
    def pairs(self) -> int:
        """Number of activation Q/DQ pairs; weight sites are not counted."""
        return sum(not site.weight for site in self.sites)


NO_PAIRS = Placement(sites=frozenset())  # of the float model, the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A set of nodes with a boundary. ``nodes`` are node names in graph order, all levels below included."""

    id: str
    type: RegionType
    parent: str | None
    children: tuple[str, ...]
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pattern: str  # digest of the canonical form, with a version prefix
    pattern_text: str = ""
