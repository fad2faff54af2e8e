"""Blocks of units that get one label: the units of one kernel, or those at one position of one pattern. Pure.

A labelling has one code for each block: the number of its label in `SchemeSpace.labels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qdqspec.graph.regions.flow import flow_of
from qdqspec.graph.regions.pattern import PatternMaker
from qdqspec.graph.unify import joined
from qdqspec.qdq.scheme.relative import Frames
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.edges import FP, Codes
from qdqspec.types import Label, LayerTime, format_of, kind_of


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


def nodes_of_blocks(space: SchemeSpace, blocks: Iterable[UnitBlock]) -> dict[str, int]:
    """The index of the block of each node."""
    return {node: b.index for b in blocks for unit in b.units for node in space.by_id[unit].nodes}


def block_labels(space: SchemeSpace, block: UnitBlock, code: int) -> dict[str, Label]:
    """Labels of the units of one block.

    Under "in+out" each unit gets its fullest label of the format; other labels apply to the units that offer them.
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
