"""Labels of units, blocks of units that get one label, and the tensors between blocks. Pure.

A block has the units of one kernel, or those at one position of one pattern. A labelling has one code for each block:
the number of its label in `SchemeSpace.labels`. The domain that a label reads or makes is float or one format of
activations. A tensor is converted once for all its readers in another domain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.graph import joined
from qdqspec.graph.ops import WEIGHT_INPUT
from qdqspec.graph.regions import PatternMaker, flow_of
from qdqspec.qdq import Frames, SchemeSpace
from qdqspec.types import Label, LayerTime, format_of, kind_of

LINEAR = frozenset(WEIGHT_INPUT)

Labels: TypeAlias = dict[str, Label]
Codes = npt.NDArray[np.int8]

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


def simple_labels(space: SchemeSpace) -> Iterator[Labels]:
    """Those that other tools give: only linear operators with weights, with float outputs; then `pure_labels`."""
    weighted = {
        unit.id
        for unit in space.units
        if unit.op_type in LINEAR and any(form.constants for form in unit.forms)
    }
    for choice in space.choices:
        for label in choice.labels:
            if kind_of(label) != "in+out":
                yield {name: given for name, given in space.uniform(label).items() if name in weighted}
    yield from pure_labels(space)


# ---- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBlock:
    """Units with one label. ``codes`` are those that at least one offers, ``pattern`` is that of tied units."""

    index: int
    units: tuple[str, ...]
    codes: tuple[int, ...]
    pattern: str = ""


def fuse(space: SchemeSpace, profiles: Iterable[Sequence[LayerTime]]) -> tuple[UnitBlock, ...]:
    """Join units that share a kernel of any profile; in graph order."""
    kernels = (
        [space.unit_of[node] for node in layer.nodes if node in space.unit_of]
        for layers in profiles
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


def uniform_codes(space: SchemeSpace, blocks: Sequence[UnitBlock]) -> Iterator[tuple[int, ...]]:
    """One label everywhere, float first, each labelling once; "in+out" is the fullest label of the format."""
    labels, seen = space.labels, set[tuple[int, ...]]()
    for code, label in enumerate(labels):
        full = range(code, len(labels)) if kind_of(label) == "in+out" else [code]
        alike = [each for each in full if format_of(labels[each]) == format_of(label)]
        codes = tuple(next((each for each in alike if each in block.codes), FP) for block in blocks)
        if codes not in seen:
            seen.add(codes)
            yield codes


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


@dataclass(frozen=True)
class Domains:
    """The domains that each code reads and makes."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of domains, in order of their numbers; pairs with float come first."""
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
