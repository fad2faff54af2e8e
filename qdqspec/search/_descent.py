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
from qdqspec.search.crossings import FLOAT, Codes, Crossing, Domains

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
        self, index: int, codes: list[int], times: list[list[float]], costs: list[list[float]]
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


# The cost of converting each tensor, estimated from the conversion kernels of profiles. Pure.
# A conversion is between two domains, in either direction: float and a format of activations, or two such
# formats. Its time is the tensor's own if measured, else the median per element of that kind; the conversion
# between two formats that was never measured costs as much as two conversions through float.


class Conversions:
    """Milliseconds of each edge's conversions: one row for each edge, one column for each pair of domains."""

    def __init__(self, edges: Sequence[Crossing], domains: Domains) -> None:
        self._edges = edges
        self._domains = domains
        self._by_tensor = {edge.tensor: number for number, edge in enumerate(edges)}
        self._seen: dict[tuple[int, int], list[float]] = {}  # by edge and kind

    def learn(self, tensor: str, codes: Codes, milliseconds: float) -> None:
        """Add a conversion kernel of a build; kinds that the tensor takes there at once share its time."""
        number = self._by_tensor.get(tensor)
        if number is None:
            return
        # labels that imply no conversion: the first kind
        kinds = self._edges[number].converted(codes, self._domains) or [0]
        for kind in kinds:
            self._seen.setdefault((number, kind), []).append(milliseconds / len(kinds))

    def costs(self) -> Floats:
        """The costs estimated so far."""
        domains = self._domains.ordered
        costs = np.zeros((len(self._edges), len(domains)))
        rates = self._per_element()
        typical = (
            float(np.median(list(rates.values()))) if rates else 0.0
        )  # of a kind that was never measured
        for number, edge in enumerate(self._edges):
            for kind, (one, other) in enumerate(domains):
                own = self._seen.get((number, kind))
                if own:
                    costs[number, kind] = np.mean(own)
                elif one == FLOAT or kind in rates:
                    costs[number, kind] = rates.get(kind, typical) * edge.elements
                else:
                    through = self._domains.pairs[FLOAT]
                    costs[number, kind] = costs[number, through[one]] + costs[number, through[other]]
        return costs

    def _per_element(self) -> dict[int, float]:
        """Milliseconds per element, by kind, for kinds that were measured."""
        rates: dict[int, list[float]] = {}
        for (number, kind), own in self._seen.items():
            if self._edges[number].elements:
                rates.setdefault(kind, []).append(float(np.mean(own)) / self._edges[number].elements)
        return {kind: float(np.median(found)) for kind, found in rates.items()}
