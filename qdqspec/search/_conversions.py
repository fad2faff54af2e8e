"""What converting each tensor costs, learnt from the conversion kernels of profiles. Pure; floors 0 to 3.

A conversion is between two worlds, whichever way: float and a format of activations, or two such formats. Its time is
the tensor's own where it was seen, else the median per element of that kind; two formats that were never seen to meet
cost what going through float does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqspec.search.crossings import FLOAT, Codes, Edge, Floats, Worlds


class Conversions:
    """Milliseconds of each edge's conversions: one row an edge, one column for each two worlds."""

    def __init__(self, edges: Sequence[Edge], worlds: Worlds) -> None:
        self._edges = edges
        self._worlds = worlds
        self._by_tensor = {edge.tensor: number for number, edge in enumerate(edges)}
        self._seen: dict[tuple[int, int], list[float]] = {}  # by edge and kind

    def learn(self, tensor: str, codes: Codes, milliseconds: float) -> None:
        """Note a conversion kernel of a build; kinds that the tensor takes there at once share its time."""
        number = self._by_tensor.get(tensor)
        if number is None:
            return
        kinds = self._edges[number].converted(codes, self._worlds) or [
            0
        ]  # where labels tell of none: the first
        for kind in kinds:
            self._seen.setdefault((number, kind), []).append(milliseconds / len(kinds))

    def costs(self) -> Floats:
        """All that is known so far."""
        worlds = self._worlds.ordered
        costs = np.zeros((len(self._edges), len(worlds)))
        rates = self._per_element()
        for number, edge in enumerate(self._edges):
            for kind, (one, other) in enumerate(worlds):
                own = self._seen.get((number, kind))
                if own:
                    costs[number, kind] = np.mean(own)
                elif one == FLOAT or kind in rates:
                    costs[number, kind] = rates.get(kind, _any(rates)) * edge.elements
                else:
                    through = self._worlds.pairs[FLOAT]
                    costs[number, kind] = costs[number, through[one]] + costs[number, through[other]]
        return costs

    def _per_element(self) -> dict[int, float]:
        """Milliseconds an element, by kind, as far as seen."""
        rates: dict[int, list[float]] = {}
        for (number, kind), own in self._seen.items():
            if self._edges[number].elements:
                rates.setdefault(kind, []).append(float(np.mean(own)) / self._edges[number].elements)
        return {kind: float(np.median(found)) for kind, found in rates.items()}


def _any(rates: dict[int, float]) -> float:
    """What is taken for a kind that was never seen: the usual of those that were."""
    return float(np.median(list(rates.values()))) if rates else 0.0
