"""Tensors between blocks, and what converting them between float and integer costs. Pure, on numpy.

A labelling is an array with one code a block: the index of its label in `qdqspec.types.LABELS`. May import
floors 0 to 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdqspec.placement.space import SchemeSpace
from qdqspec.types import LABELS

Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float64]

FP, FULL = LABELS.index("fp"), LABELS.index("in+out")


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor between blocks. ``producer`` is -1, and ``outside`` set, where no block makes or some other reads it."""

    tensor: str
    elements: float
    producer: int
    consumers: tuple[int, ...]
    outside: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indexes of the blocks it touches."""
        return self.consumers if self.producer < 0 else (self.producer, *self.consumers)

    def crosses(self, codes: Codes | Sequence[int]) -> bool:
        """Whether it is made in one world and read in the other."""
        made_integer = bool(self.producer >= 0 and codes[self.producer] == FULL)
        if self.outside and made_integer:
            return True
        for index in self.consumers:  # noqa: SIM110 - a search does this a million times; any() takes twice as long
            if (codes[index] != FP) != made_integer:
                return True
        return False


def edges_between(space: SchemeSpace, block_of: Mapping[str, int]) -> tuple[Edge, ...]:
    """The activations that a labelling may have to convert; ``block_of`` gives the block of a node."""
    model, edges = space.model, []
    for tensor in sorted(space.tensors):
        ends = [block_of.get(end.node, -1) for end in model.consumers.get(tensor, ())]
        maker = model.producer.get(tensor)
        producer = block_of.get(maker.name, -1) if maker else -1
        consumers = tuple(sorted({end for end in ends if end not in (-1, producer)}))
        outside = -1 in ends or tensor in model.outputs or tensor in model.subgraph_reads
        if consumers or (outside and producer >= 0):
            elements = float(np.prod([dim or 1 for dim in model.shape(tensor) or ()]))
            edges.append(Edge(tensor, elements, producer, consumers, outside))
    return tuple(edges)


class Crossings:
    """All edges at once, as arrays: what a labelling converts is one pass without a loop."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._producer = np.array([edge.producer for edge in edges], dtype=np.int64)
        self._outside = np.array([edge.outside for edge in edges], dtype=bool)
        self._reader = np.array([c for edge in edges for c in edge.consumers], dtype=np.int64)
        self._edge = np.repeat(np.arange(len(edges)), [len(edge.consumers) for edge in edges])

    def of(self, codes: Codes) -> npt.NDArray[np.bool_]:
        """For each edge, whether the labelling makes it cross."""
        made = (self._producer >= 0) & (codes[self._producer] == FULL)
        crossing: npt.NDArray[np.bool_] = made & self._outside
        differs = (codes[self._reader] != FP) != made[self._edge]
        crossing[self._edge[differs]] = True
        return crossing
