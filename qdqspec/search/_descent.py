"""Coordinate descent to a locally optimal labelling, one group of blocks at a time. Pure.

A step changes the code of one group of blocks that share a code. A group is visited again only after a neighbour has
changed, the conversions of an edge are cached for each labelling of its ends, and all numbers are Python's own: reading
an element of an array takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.crossings import Codes, Crossing, Domains

SWEEPS = 20  # an upper bound; it converges in a few
_MOST_ENDS = 8  # ends of an edge whose conversions are cached: with more there are too many labellings


class Descent:
    """Groups of blocks with the codes each may take, and the edges between blocks."""

    def __init__(
        self,
        offered: Sequence[tuple[int, ...]],
        edges: Sequence[Crossing],
        domains: Domains,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """``offered`` has the codes of each of the ``groups`` of blocks; without groups each block is one."""
        self._offered = offered
        self._groups = [(index,) for index in range(len(offered))] if groups is None else groups
        self._conversions = [_Conversion(edge, domains) for edge in edges]
        group_of = {block: number for number, blocks in enumerate(self._groups) for block in blocks}
        around: list[dict[int, None]] = [{} for _ in self._groups]  # edges by group, each once
        for number, edge in enumerate(edges):
            for block in edge.blocks:
                around[group_of[block]][number] = None
        self._around = tuple(map(tuple, around))
        self.neighbours = tuple(
            {group_of[block] for number in numbers for block in edges[number].blocks} - {index}
            for index, numbers in enumerate(self._around)
        )

    def settle(self, start: Codes, times: Floats, costs: Floats) -> Codes:
        """Change one group at a time to its best code until nothing improves.

        ``times`` holds milliseconds by block and code, ``costs`` those of converting each edge between two domains.
        """
        codes, spent, converting = start.tolist(), times.tolist(), costs.tolist()
        stale = {index for index, offered in enumerate(self._offered) if len(offered) > 1}
        for _ in range(SWEEPS):
            if not stale:
                break
            for index in range(len(self._groups)):
                if index in stale:
                    stale.discard(index)
                    if self._improve(index, codes, spent, converting):
                        stale |= self.neighbours[index]
        return np.array(codes, dtype=np.int8)

    def crossing(
        self, index: int, codes: Codes | Sequence[int], costs: Floats | Sequence[Sequence[float]]
    ) -> float:
        """The cost of converting the tensors around a group."""
        total = 0.0
        for number in self._around[index]:
            for kind in self._conversions[number].kinds(codes):
                total += costs[number][kind]
        return total

    def _improve(
        self,
        index: int,
        codes: list[int],
        times: Sequence[Sequence[float]],
        costs: Sequence[Sequence[float]],
    ) -> bool:
        """Set a group to its best code with all others fixed; false if none is better than the present one."""
        blocks = self._groups[index]
        best = [codes[block] for block in blocks]
        least = sum(times[block][codes[block]] for block in blocks) + self.crossing(index, codes, costs)
        better = False
        for code in self._offered[index]:
            found = 0.0
            for block in blocks:
                codes[block] = code
                found += times[block][code]
            found += self.crossing(index, codes, costs)
            if found < least:
                best, least, better = [code] * len(blocks), found, True
        for block, code in zip(blocks, best, strict=True):
            codes[block] = code
        return better


class _Conversion:
    """The conversions of one edge under a labelling."""

    def __init__(self, edge: Crossing, domains: Domains) -> None:
        self._edge, self._domains = edge, domains
        self._ends: Callable[[Any], object] | None = (
            itemgetter(*edge.blocks) if len(edge.blocks) <= _MOST_ENDS else None
        )
        self._known: dict[object, list[int]] = {}

    def kinds(self, codes: Codes | Sequence[int]) -> list[int]:
        if self._ends is None:
            return self._edge.converted(codes, self._domains)
        ends = self._ends(codes)
        found = self._known.get(ends)
        if found is None:
            found = self._known[ends] = self._edge.converted(codes, self._domains)
        return found
