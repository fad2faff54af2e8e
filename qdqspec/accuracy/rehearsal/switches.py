"""The switches of a rehearsal: one for each edge of the model and each Q/DQ pair that can be inserted there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.errors import PlacementError
from qdqspec.qdq.quantize.formats import number_format
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.qdq.space.units import Edge
from qdqspec.types import Consumer, Label, Placement, Site

SwitchStates: TypeAlias = npt.NDArray[np.bool_]  # whether each switch is on, by number
_Key: TypeAlias = tuple[str, Consumer, str, int | None, bool]


class Switches:
    """Switches by number. A site covers one switch for each of its consumers.

    ``sites`` are those of all placements to be rehearsed, or larger ones of the same tensor and format.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._number: dict[_Key, int] = {}
        self._sites: list[Site] = []
        for site in sorted(sites, key=lambda site: site.row):
            for end in site.consumers:
                key = _key(site, end)
                if key not in self._number:
                    self._number[key] = len(self._sites)
                    self._sites.append(site if len(site.consumers) == 1 else replace(site, consumers=(end,)))

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        """The site of each switch, with its one consumer."""
        return iter(self._sites)

    def __getitem__(self, number: int) -> Site:
        return self._sites[number]

    def by_edge(self) -> dict[Edge, list[int]]:
        """The numbers of the switches on each edge, one for each format."""
        found: dict[Edge, list[int]] = {}
        for number, site in enumerate(self._sites):
            found.setdefault((site.tensor, site.consumers[0]), []).append(number)
        return found

    def numbers(self, site: Site) -> list[int]:
        """The numbers of the switches that a site covers. Raises `PlacementError` if one is missing."""
        keys = [_key(site, end) for end in site.consumers]
        missing = [key for key in keys if key not in self._number]
        if missing:
            tensor, end, fmt, *_ = missing[0]
            reader = f"input {end.input} of node '{end.node}'"
            where = f"graph output {end.input}" if end.is_output else reader
            raise PlacementError(
                f"the rehearsal has no {fmt} pair on tensor '{tensor}' before {where}",
                cure="rehearse placements of the space, or of the pairs, that it was opened with",
            )
        return [self._number[key] for key in keys]

    def setting(self, placement: Placement) -> SwitchStates:
        """The switches of a placement on, all others off. Raises `PlacementError` if one does not exist."""
        found = np.zeros(len(self), np.bool_)
        for site in placement.ordered:
            found[self.numbers(site)] = True
        return found


def _key(site: Site, end: Consumer) -> _Key:
    return site.tensor, end, site.format, site.axis, site.weight


def labelled_sites(space: SchemeSpace) -> dict[tuple[str, Label], tuple[Site, ...]]:
    """The sites of each (unit, label) alone, everything else in floating point."""
    return {
        (unit.id, label): space.resolve({unit.id: label}).ordered
        for unit in space.units
        for label in (*unit.labels, *unit.halves)
        if label != "fp"
    }


def sites_of(space: SchemeSpace) -> tuple[Site, ...]:
    """The sites of every (unit, label) of a space that the reference runtime computes.

    Blocks whose scales are computed when the model runs are left out: the reference runtime lacks their operators.
    """
    found = (site for sites in labelled_sites(space).values() for site in sites)
    return tuple(dict.fromkeys(site for site in found if not is_foreign(site)))


def is_foreign(site: Site) -> bool:
    """Whether a pair consists of operators of domain ``trt``, which the reference runtime lacks."""
    fmt = number_format(site.format)
    return fmt.dynamic and not fmt.at_run_time
