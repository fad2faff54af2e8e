"""The tensors between blocks, and the conversions that they take under a labelling. Pure.

A labelling has the index of a label in `SchemeSpace.labels` for each block. The domain that a label reads or makes is
float or one format of activations. A tensor is converted once for all its readers in another domain.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import format_of, kind_of

Codes = npt.NDArray[np.int8]

FP = 0  # the code of "fp", the first label of each space
FLOAT = 0  # the domain of floats


@dataclass(frozen=True)
class Domains:
    """The domains that each code reads and makes."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Each two domains in order of their numbers; those with float come first."""
        return list(itertools.combinations(range(1 + max(*self.reads, *self.makes, 1)), 2))

    @cached_property
    def number(self) -> dict[tuple[int, int], int]:
        """The number of each two domains, in either order."""
        pairs = enumerate(self.pairs)
        return {key: number for number, (one, other) in pairs for key in ((one, other), (other, one))}


def domains_of(space: SchemeSpace) -> Domains:
    """The domains of a space: float, and each format of activations; ranges found at run time have their own."""
    numbers: dict[str, int] = {}
    reads, makes = [FLOAT], [FLOAT]
    choices = {choice.name: choice for choice in space.choices}
    for label in space.labels[1:]:
        fmt = choices[format_of(label)].reads(kind_of(label))
        domain = FLOAT if fmt is None else numbers.setdefault(fmt, len(numbers) + 1)
        reads.append(domain)
        makes.append(domain if kind_of(label) == "in+out" else FLOAT)
    return Domains(tuple(reads), tuple(makes))


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor between blocks. ``producer`` is -1 if no block produces it, ``outside`` is set if others read it."""

    tensor: str
    elements: float
    producer: int
    consumers: tuple[int, ...]
    outside: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indexes of the blocks at its ends."""
        return self.consumers if self.producer < 0 else (self.producer, *self.consumers)

    def conversions(self, codes: Sequence[int], domains: Domains) -> list[int]:
        """The conversions that it takes, as numbers of pairs of domains."""
        reads, number = domains.reads, domains.number
        made = domains.makes[codes[self.producer]] if self.producer >= 0 else FLOAT
        wanted = {reads[codes[block]] for block in self.consumers}
        if self.outside:
            wanted.add(FLOAT)
        return [number[made, domain] for domain in wanted if domain != made]


def edges_between(space: SchemeSpace, block_of: Mapping[str, int]) -> tuple[Edge, ...]:
    """The activations that a labelling may have to convert; ``block_of`` gives the block of a node."""
    model, edges = space.model, []
    for tensor in sorted(space.tensors):
        ends = [block_of.get(end.node, -1) for end in model.consumers.get(tensor, ())]
        maker = model.producer.get(tensor)
        producer = block_of.get(maker.name, -1) if maker else -1
        consumers = tuple(sorted({end for end in ends if end not in (-1, producer)}))
        outside = -1 in ends or tensor in model.outputs or tensor in model.captured
        if consumers or (outside and producer >= 0):
            elements = float(np.prod([dim or 1 for dim in model.shape(tensor) or ()]))
            edges.append(Edge(tensor, elements, producer, consumers, outside))
    return tuple(edges)
