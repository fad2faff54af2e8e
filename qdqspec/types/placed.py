"""Where Q/DQ stands: sites, placements, and the regions they belong to. Standard library only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import NamedTuple

from qdqspec.types.words import Label, RegionType


class Consumer(NamedTuple):
    """An edge's end: input ``input`` of node ``node``."""

    node: str
    input: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One Q/DQ pair: a tensor, the consumers that see it quantized, and the number format.

    ``axis`` is set where scales are per channel (weights). ``weight`` marks a constant tensor.
    Tensor and node names are those of the model without Q/DQ.
    """

    tensor: str
    consumers: tuple[Consumer, ...]
    format: str
    axis: int | None = None
    weight: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "consumers", tuple(sorted(Consumer(*c) for c in self.consumers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where Q/DQ pairs stand in a whole model. Equal sites are the same placement, whatever the labels.

    ``labels`` remembers which label each block was given, for strategies that think in blocks.
    """

    sites: frozenset[Site]
    labels: tuple[tuple[str, Label], ...] = field(default=(), compare=False)
    _digest: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = sorted(
            json.dumps([s.tensor, [list(c) for c in s.consumers], s.format, s.axis, s.weight])
            for s in self.sites
        )
        object.__setattr__(self, "_digest", hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16])

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return self._digest

    @property
    def pairs(self) -> int:
        """How many activation Q/DQ pairs it has; weight sites are not counted."""
        return sum(not site.weight for site in self.sites)


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
