"""Blocks of units that get one label. Pure.

The operators of one kernel must not be separated: units that share a kernel in any profiled build form one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qdqspec.graph.unify import joined
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.regions.flow import flow_of
from qdqspec.regions.pattern import PatternMaker
from qdqspec.search.edges import FP, Codes
from qdqspec.types import Label, LayerTime, format_of, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBlock:
    """Units with one label. ``codes`` are the labels that at least one of them offers, as numbers."""

    index: int
    units: tuple[str, ...]
    codes: tuple[int, ...]


def fuse(space: SchemeSpace, profiles: Iterable[Sequence[LayerTime]]) -> tuple[UnitBlock, ...]:
    """Join units that share a kernel of any profile; in graph order."""
    kernels = (
        [space.unit_of[node] for node in layer.nodes if node in space.unit_of]
        for layers in profiles
        for layer in layers
        if not layer.boundary
    )
    found = []
    for index, names in enumerate(joined((unit.id for unit in space.units), kernels)):
        codes = {space.labels.index(label) for name in names for label in space.by_id[name].labels}
        found.append(UnitBlock(index=index, units=names, codes=tuple(sorted(codes))))
    return tuple(found)


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


def block_codes(space: SchemeSpace, blocks: Sequence[UnitBlock], labels: Mapping[str, Label]) -> Codes:
    """Codes of blocks from labels of units: a block gets the fullest label among its units."""
    ranked = sorted(range(len(space.labels)), key=lambda code: kind_of(space.labels[code]) != "in+out")
    codes = np.full(len(blocks), FP, dtype=np.int8)
    for block in blocks:
        given = {labels.get(name, "fp") for name in block.units}
        codes[block.index] = next((code for code in ranked if code != FP and space.labels[code] in given), FP)
    return codes


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
