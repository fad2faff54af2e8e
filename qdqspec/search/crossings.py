"""Tensors between blocks, their conversions between float and narrow formats, and the cost of these. Pure, on numpy.

A labelling is an array with one code for each block: the index of its label in `SchemeSpace.labels`. The domain that a
label reads or produces is float or one format of activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Floats
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.types import format_of, kind_of

Codes = npt.NDArray[np.int8]

FP = 0  # the code of "fp", the first label of each space
FLOAT = 0  # the domain of floats
RUN_ELEMENTS = 4096  # that a conversion kernel converts in the time of starting one, at least


def all_float(count: int) -> Codes:
    """The labelling with all of so many blocks in floating point."""
    return np.full(count, FP, dtype=np.int8)


@dataclass(frozen=True)
class Domains:
    """The domains that each code reads and produces, and a number for each unordered pair of domains."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of domains."""
        return max(*self.reads, *self.makes, 1) + 1

    @property
    def ordered(self) -> list[tuple[int, int]]:
        """Each pair of domains in order of their numbers; those with float come first."""
        return [(one, other) for one in range(self.count) for other in range(one + 1, self.count)]

    @cached_property
    def pairs(self) -> list[list[int]]:
        """The number of each two domains, in either order."""
        table = np.zeros((self.count, self.count), dtype=int)
        for number, (one, other) in enumerate(self.ordered):
            table[one, other] = table[other, one] = number
        return table.tolist()


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
class Crossing:
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

    def converted(self, codes: Codes | Sequence[int], domains: Domains) -> list[int]:
        """The conversions it takes, each once for all its readers, as numbers of pairs of domains."""
        made = domains.makes[codes[self.producer]] if self.producer >= 0 else FLOAT
        wanted = {domains.reads[codes[index]] for index in self.consumers}
        if self.outside:
            wanted.add(FLOAT)
        wanted.discard(made)
        return [domains.pairs[made][domain] for domain in wanted]


def edges_between(space: SchemeSpace, block_of: Mapping[str, int]) -> tuple[Crossing, ...]:
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
            edges.append(Crossing(tensor, elements, producer, consumers, outside))
    return tuple(edges)


class Crossings:
    """All edges as arrays: the conversions of a labelling are computed in one vectorized pass."""

    def __init__(self, edges: Sequence[Crossing], domains: Domains) -> None:
        self._producer = np.array([edge.producer for edge in edges], dtype=np.int64)
        self._outside = np.array([edge.outside for edge in edges], dtype=bool)
        self._reader = np.array([c for edge in edges for c in edge.consumers], dtype=np.int64)
        self._edge = np.repeat(np.arange(len(edges)), [len(edge.consumers) for edge in edges])
        self._reads, self._makes = np.array(domains.reads), np.array(domains.makes)
        self._pairs = np.array(domains.pairs)
        self._shape = len(edges), domains.count
        self._kinds = len(domains.ordered)

    def of(self, codes: Codes) -> npt.NDArray[np.bool_]:
        """For each edge and each pair of domains, whether the labelling converts between the two."""
        made = np.where(self._producer >= 0, self._makes[codes[self._producer]], FLOAT)
        wanted = np.zeros(self._shape, dtype=bool)
        wanted[self._edge, self._reads[codes[self._reader]]] = True
        wanted[self._outside, FLOAT] = True
        wanted[np.arange(len(made)), made] = False
        edge, domain = np.nonzero(wanted)
        converted = np.zeros((len(made), self._kinds), dtype=bool)
        converted[edge, self._pairs[made[edge], domain]] = True
        return converted

    def spent(self, codes: Codes, costs: Floats) -> Floats:
        """The cost of a labelling's conversions for each pair of domains, from that by edge and pair."""
        spent: Floats = np.where(self.of(codes), costs, 0.0).sum(axis=0)
        return spent


class Conversions:
    """Milliseconds of each edge's conversions: one row for each edge, one column for each pair of domains.

    They are estimated from the conversion kernels of profiles. A conversion is between two domains, in either
    direction: float and a format of activations, or two such formats. Its time is the tensor's own if measured, else
    that of its kind: a part for each run of a kernel, and one for each element. The conversion between two formats that
    was never measured costs as much as two conversions through float.
    """

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
        fitted = self._by_kind()
        for number, edge in enumerate(self._edges):
            for kind, (one, other) in enumerate(domains):
                own = self._seen.get((number, kind))
                if own:
                    costs[number, kind] = np.mean(own)
                elif one == FLOAT or kind in fitted:
                    costs[number, kind] = fitted.get(kind, fitted.get(None, Times())).of(edge.elements)
                else:
                    through = self._domains.pairs[FLOAT]
                    costs[number, kind] = costs[number, through[one]] + costs[number, through[other]]
        return costs

    def _by_kind(self) -> dict[int | None, Times]:
        """The times of each kind that was measured, and of all kinds together."""
        found: dict[int | None, list[tuple[float, float]]] = {}
        for (number, kind), own in self._seen.items():
            for key in (kind, None):
                found.setdefault(key, []).append((self._edges[number].elements, float(np.mean(own))))
        return {kind: Times.fitted(points) for kind, points in found.items()}


class Times(NamedTuple):
    """The milliseconds of a kernel: those of each run, and those for each element."""

    run: float = 0.0
    element: float = 0.0

    @classmethod
    def fitted(cls, points: Iterable[tuple[float, float]]) -> Times:
        """The line through the means of the smaller and the larger half of (elements, milliseconds).

        Source: A. Wald, "The fitting of straight lines if both variables are subject to error", Annals of Mathematical
        Statistics 11, 1940. A run takes at least the time of `RUN_ELEMENTS` elements.
        """
        sizes, times = np.array(sorted(points), np.float64).T
        half = len(sizes) // 2
        rise = sizes[len(sizes) - half :].sum() - sizes[:half].sum()
        slope = (times[len(sizes) - half :].sum() - times[:half].sum()) / rise if rise > 0 else np.inf
        slope = float(np.clip(slope, 0.0, times.sum() / (sizes + RUN_ELEMENTS).sum()))
        return cls(float(times.mean() - slope * sizes.mean()), slope)

    def of(self, elements: float) -> float:
        """The milliseconds of a kernel for so many elements."""
        return self.run + self.element * elements
