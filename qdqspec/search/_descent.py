"""Coordinate descent to a locally optimal labelling. A step changes the code of one group of blocks that share a code.

A group is visited again only after a neighbour has changed, the conversions of an edge are cached for each labelling of
its ends, and all numbers are Python's own: reading an element of an array takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.crossings import Codes, Domains

SWEEPS = 20  # an upper bound; it converges in a few
MOST_ENDS = 8  # ends of an edge whose conversions are cached: with more there are too many labellings


class Edge(Protocol):
    """A cost of a labelling of several blocks, apart from the costs of each."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indexes of the blocks."""
        ...

    def converted(self, codes: Codes | Sequence[int], domains: Domains, /) -> list[int]:
        """The numbers of the costs that a labelling causes."""
        ...


class Descent:
    """Groups of blocks with the codes each may take, and the edges between blocks."""

    def __init__(
        self,
        offered: Sequence[tuple[int, ...]],
        edges: Sequence[Edge],
        domains: Domains,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """``offered`` has the codes of each of the ``groups`` of blocks; without groups each block is one."""
        self._offered = offered
        self._groups = [(index,) for index in range(len(offered))] if groups is None else groups
        self._converted = [_converter(edge, domains) for edge in edges]
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
            for kind in self._converted[number](codes):
                total += costs[number][kind]
        return total

    def _improve(
        self, index: int, codes: list[int], times: list[list[float]], costs: list[list[float]]
    ) -> bool:
        """Set a group to its best code with all others fixed; false if none is better than the present one."""
        blocks = self._groups[index]
        best = now = [codes[block] for block in blocks]
        least = self._around_ms(index, codes, times, costs)
        for code in self._offered[index]:
            wanted = [code] * len(blocks)
            if wanted == now:
                continue
            for block in blocks:
                codes[block] = code
            found = self._around_ms(index, codes, times, costs)
            if found < least:
                best, least = wanted, found
        for block, code in zip(blocks, best, strict=True):
            codes[block] = code
        return best is not now

    def _around_ms(
        self, index: int, codes: list[int], times: list[list[float]], costs: list[list[float]]
    ) -> float:
        """The cost of a group and of converting the tensors around it."""
        total = self.crossing(index, codes, costs)
        for block in self._groups[index]:
            total += times[block][codes[block]]
        return total


def _converter(edge: Edge, domains: Domains) -> Callable[[Codes | Sequence[int]], list[int]]:
    """The conversions of one edge under a labelling, as a function that computes those of the same ends once."""
    if len(edge.blocks) > MOST_ENDS:
        return lambda codes: edge.converted(codes, domains)
    ends_of: Callable[[Any], object] = itemgetter(*edge.blocks)
    known: dict[object, list[int]] = {}

    def converted(codes: Codes | Sequence[int]) -> list[int]:
        ends = ends_of(codes)
        found = known.get(ends)
        if found is None:
            found = known[ends] = edge.converted(codes, domains)
        return found

    return converted
