"""The best labelling near another: one block at a time among its neighbours. Pure; floors 0 to 3 and `crossings`.

Coordinate descent over blocks and the tensors between them. A block is looked at again only after a neighbour has
changed, and all numbers are plain ones: an element of an array takes ten times as long to read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqspec.search.crossings import Codes, Edge, Floats, Worlds

SWEEPS = 20  # it settles in a few; this only bounds it


class Descent:
    """Blocks with the codes each may take, and the edges between them."""

    def __init__(self, offered: Sequence[tuple[int, ...]], edges: Sequence[Edge], worlds: Worlds) -> None:
        self._offered = offered
        self._edges = edges
        self._worlds = worlds
        self._touching: tuple[tuple[int, ...], ...] = _touching(len(offered), edges)  # edges by block
        self.neighbours = tuple(
            {block for number in numbers for block in edges[number].blocks} - {index}
            for index, numbers in enumerate(self._touching)
        )

    def settle(self, start: Codes, times: Floats, costs: Floats) -> Codes:
        """Change one block at a time to its best code until nothing improves.

        ``times`` holds milliseconds by block and code, ``costs`` those of converting each edge between two worlds.
        """
        codes, spent, converting = start.tolist(), times.tolist(), costs.tolist()
        stale = {index for index, offered in enumerate(self._offered) if len(offered) > 1}
        for _ in range(SWEEPS):
            if not stale:
                break
            for index in range(len(codes)):
                if index in stale:
                    stale.discard(index)
                    best = self._best(index, codes, spent[index], converting)
                    if best != codes[index]:
                        codes[index] = best
                        stale |= self.neighbours[index]
        return np.array(codes, dtype=np.int8)

    def crossing(
        self, index: int, codes: Codes | Sequence[int], costs: Floats | Sequence[Sequence[float]]
    ) -> float:
        """What converting the tensors around a block costs."""
        edges, worlds = self._edges, self._worlds
        return sum(
            costs[number][kind]
            for number in self._touching[index]
            for kind in edges[number].converted(codes, worlds)
        )

    def _best(
        self, index: int, codes: list[int], times: Sequence[float], costs: Sequence[Sequence[float]]
    ) -> int:
        """The best code of a block, all else as it is; the one that it has where none is better."""
        best = current = codes[index]
        least = times[current] + self.crossing(index, codes, costs)
        for code in self._offered[index]:
            codes[index] = code
            found = times[code] + self.crossing(index, codes, costs)
            if found < least:
                best, least = code, found
        codes[index] = current
        return best


def _touching(blocks: int, edges: Sequence[Edge]) -> tuple[tuple[int, ...], ...]:
    touching: list[list[int]] = [[] for _ in range(blocks)]
    for number, edge in enumerate(edges):
        for index in edge.blocks:
            touching[index].append(number)
    return tuple(map(tuple, touching))
