"""Branch and bound for the items with the largest noise, by measuring groups of items. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Noisiest(Generic[T]):
    """Items by falling noise, as many as are iterated, each with the noise power that ``hear`` returns for it alone.

    Noise powers are additive, so that a group has at least the noise of its noisiest member: the noisiest
    group is divided until it is one item, which no other can exceed (branch and bound). A few of n items take
    about their number times 2 log n measurements; if more than that are wanted, each item is measured at
    once, which takes n.
    """

    def __init__(
        self, items: Sequence[T], hear: Callable[[Sequence[T]], float], wanted: int | None = None
    ) -> None:
        self._hear = hear
        self._groups: list[tuple[float, int, Sequence[T]]] = []  # a heap: the noisiest first
        self._heard = 0
        for group in _parts(items, wanted):
            self._add(group)

    def __iter__(self) -> Iterator[tuple[T, float]]:
        while self._groups:
            power, _, group = heapq.heappop(self._groups)
            if len(group) == 1:
                yield group[0], -power
            else:
                middle = len(group) // 2
                self._add(group[:middle])
                self._add(group[middle:])

    @property
    def rest(self) -> float:
        """Noise power of all items not yet returned."""
        return math.fsum(-power for power, _, _ in self._groups)

    def _add(self, group: Sequence[T]) -> None:
        heapq.heappush(self._groups, (-self._hear(group), self._heard, group))
        self._heard += 1


def _parts(items: Sequence[T], wanted: int | None) -> Iterator[Sequence[T]]:
    """The first groups to measure: two halves if few items are wanted, else each item alone."""
    few = wanted is not None and 2 * wanted * math.log2(max(len(items), 1)) < len(items)
    size = math.ceil(len(items) / 2) if few else 1
    for start in range(0, len(items), size):
        yield items[start : start + size]
