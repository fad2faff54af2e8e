"""The cost of converting each tensor, estimated from the conversion kernels of profiles. Pure.

A conversion is between two domains, in either direction: float and a format of activations, or two such formats. Its
time is the tensor's own if measured, else the median per element of that kind; the conversion between two formats that
was never measured costs as much as two conversions through float.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.crossings import FLOAT, Codes, Crossing, Domains


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
        kinds = self._edges[number].converted(codes, self._domains) or [
            0
        ]  # labels that imply no conversion: the first kind
        for kind in kinds:
            self._seen.setdefault((number, kind), []).append(milliseconds / len(kinds))

    def costs(self) -> Floats:
        """The costs estimated so far."""
        domains = self._domains.ordered
        costs = np.zeros((len(self._edges), len(domains)))
        rates = self._per_element()
        for number, edge in enumerate(self._edges):
            for kind, (one, other) in enumerate(domains):
                own = self._seen.get((number, kind))
                if own:
                    costs[number, kind] = np.mean(own)
                elif one == FLOAT or kind in rates:
                    costs[number, kind] = rates.get(kind, _any(rates)) * edge.elements
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


def _any(rates: dict[int, float]) -> float:
    """The cost of a kind that was never measured: the median of the measured ones."""
    return float(np.median(list(rates.values()))) if rates else 0.0
