"""Labels of units, blocks of units that get one label, and the tensors between blocks. Pure.

A block has the units of one kernel, or those at one position of one pattern. A labelling has one code for each block:
the number of its label in `SchemeSpace.labels`. The domain that a label reads or makes is float or one format of
activations. A tensor is converted once for all its readers in another domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from qdqspec._core.groups import joined
from qdqspec.graph.ops import WEIGHT_INPUT
from qdqspec.graph.regions import PatternMaker, flow_of
from qdqspec.qdq import Frames, SchemeSpace
from qdqspec.types import Label, LayerTime, Trial, format_of, kind_of

LINEAR = frozenset(WEIGHT_INPUT)

Labels: TypeAlias = dict[str, Label]
Codes = npt.NDArray[np.int8]
_Item = TypeVar("_Item")

FP = 0  # the code of "fp", the first label of each space
FLOAT = 0  # the domain of floats


# ---- units -----------------------------------------------------------------------------------------


def spent_by_unit(space: SchemeSpace, layers: Sequence[LayerTime]) -> dict[str, float]:
    """Milliseconds of each unit; a kernel's time is divided among its units. Without a profile all are equal."""
    if not layers:
        return dict.fromkeys((unit.id for unit in space.units), 1.0)
    spent = dict.fromkeys((unit.id for unit in space.units), 0.0)
    for layer in layers:
        owners = {space.unit_of[node] for node in layer.nodes if node in space.unit_of}
        for owner in owners:
            spent[owner] += layer.milliseconds / len(owners)
    return spent


def pure_labels(space: SchemeSpace) -> Iterator[Labels]:
    """For each format: everything, each label with float outputs on all units, and only linear operators."""
    for choice in space.choices:
        everything = space.everything(choice.name)
        yield everything
        yield from (space.uniform(label) for label in choice.labels if kind_of(label) != "in+out")
        yield {name: label for name, label in everything.items() if space.by_id[name].op_type in LINEAR}


# ---- what does not build ---------------------------------------------------------------------------


def named_in(failed: Trial, space: SchemeSpace) -> set[str]:
    """The units with a node that the error of a build names."""
    error = failed.error or ""
    return {unit.id for unit in space.units if any(f"'{node}'" in error for node in unit.nodes)}


class Halving(Generic[_Item]):
    """Finds as many items as build together, as in delta debugging. Later groups of items are suspected.

    While some are ``left``, build those that are `tried`, and report the result. Zeller and Hildebrandt, IEEE
    Transactions on Software Engineering 28, 2002.
    """

    def __init__(self, *groups: Sequence[_Item]) -> None:
        self.kept: list[_Item] = []
        self.left = [group for group in reversed(groups) if group]

    @property
    def tried(self) -> list[_Item]:
        """The items to build next: those that build, and the next group."""
        return [*self.kept, *self.left[-1]]

    def learn(self, *, builds: bool) -> None:
        """Keep the group that was tried if it builds, else halve it."""
        more = self.left.pop()
        if builds:
            self.kept += more
        elif (middle := len(more) // 2) > 0:
            self.left += [more[middle:], more[:middle]]


# ---- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBlock:
    """Units with one label. ``codes`` are those that at least one offers, ``pattern`` is that of tied units."""

    index: int
    units: tuple[str, ...]
    codes: tuple[int, ...]
    pattern: str = ""


def fuse(space: SchemeSpace, layers: Iterable[LayerTime]) -> tuple[UnitBlock, ...]:
    """Join units that share a kernel; in graph order."""
    kernels = (
        [space.unit_of[node] for node in layer.nodes if node in space.unit_of]
        for layer in layers
        if not layer.boundary
    )
    groups = joined((unit.id for unit in space.units), kernels)
    return tuple(_block(space, index, units) for index, units in enumerate(groups))


def tie(space: SchemeSpace) -> tuple[UnitBlock, ...]:
    """Join units at one position of one pattern, in order of their first units; without regions each is a block."""
    frames = Frames(space.model, space.regions)
    groups: dict[tuple[str, int], list[str]] = {}
    for unit in space.units:
        place = unit.id, 0
        if unit.id in frames.leaf_of:
            frame = frames.of(frames.leaf_of[unit.id])
            place = frame.pattern, frame.position[unit.id]
        groups.setdefault(place, []).append(unit.id)
    return tuple(
        _block(space, index, units, pattern) for index, ((pattern, _), units) in enumerate(groups.items())
    )


def _block(space: SchemeSpace, index: int, units: Sequence[str], pattern: str = "") -> UnitBlock:
    codes = {space.labels.index(label) for name in units for label in space.by_id[name].labels}
    return UnitBlock(index=index, units=tuple(units), codes=tuple(sorted(codes)), pattern=pattern)


def block_labels(space: SchemeSpace, block: UnitBlock, code: int) -> dict[str, Label]:
    """Labels of the units of one block.

    "in+out" gives each unit its fullest label of the format. Any other label goes to the units that offer it; the rest
    stay float.
    """
    label, labels = space.labels[code], {}
    for name in block.units:
        unit = space.by_id[name]
        wanted = unit.full_in(format_of(label)) if kind_of(label) == "in+out" else label
        if wanted in unit.labels:
            labels[name] = wanted
    return labels


def labels_of(space: SchemeSpace, blocks: Iterable[UnitBlock], codes: Iterable[int]) -> dict[str, Label]:
    """Labels of units from codes of blocks."""
    own = (block_labels(space, block, code) for block, code in zip(blocks, codes, strict=True))
    return {unit: label for labels in own for unit, label in labels.items()}


def block_codes(space: SchemeSpace, blocks: Sequence[UnitBlock], labels: Mapping[str, Label]) -> Codes:
    """Codes of blocks from labels of units: a block gets the fullest label among its units."""
    ranked = sorted(range(len(space.labels)), key=lambda code: kind_of(space.labels[code]) != "in+out")
    codes = np.full(len(blocks), FP, dtype=np.int8)
    for index, block in enumerate(blocks):
        given = {labels.get(name, "fp") for name in block.units}
        codes[index] = next((code for code in ranked if code != FP and space.labels[code] in given), FP)
    return codes


def uniform_codes(space: SchemeSpace, blocks: Sequence[UnitBlock]) -> list[tuple[int, ...]]:
    """The codes of blocks for no labels, and for those of `pure_labels`; each labelling once."""
    codes = (tuple(block_codes(space, blocks, labels).tolist()) for labels in ({}, *pure_labels(space)))
    return list(dict.fromkeys(codes))


def classes_of(space: SchemeSpace, blocks: Sequence[UnitBlock]) -> list[int]:
    """A class number for each block: equal if operators, attributes and shapes are equal."""
    maker = PatternMaker(flow_of(space.model), "structure+shapes")
    numbers: dict[str, int] = {}
    found = []
    for block in blocks:
        nodes = [space.model.by_name[name].index for unit in block.units for name in space.by_id[unit].nodes]
        digest = maker.make(index for index in nodes if index in maker.place).digest
        found.append(numbers.setdefault(digest, len(numbers)))
    return found


# ---- tensors between blocks ------------------------------------------------------------------------


class Domains(NamedTuple):
    """The numbers of the domains that each code reads and makes; float is 0."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]


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

    def conversions(self, codes: Sequence[int], domains: Domains) -> list[tuple[int, int]]:
        """The conversions that it takes, each as two domains, the lower number first."""
        reads = domains.reads
        made = domains.makes[codes[self.producer]] if self.producer >= 0 else FLOAT
        wanted = {reads[codes[block]] for block in self.consumers}
        if self.outside:
            wanted.add(FLOAT)
        return [(min(made, read), max(made, read)) for read in wanted if read != made]


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
