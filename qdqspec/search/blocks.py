"""Blocks that get one label, and a cost model of labelled blocks learnt from layer profiles.

May import floors 0 to 3. Pure: profiles in, labels out. Where kernels fuse, the operators in one kernel must
not be torn apart, so units that share a kernel in any profiled build form one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.types import LABELS, Label, LayerTime, Trial

SWEEPS = 20  # coordinate descent settles in a few; this only bounds it


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Units that carry one label. ``labels`` are those that at least one of them offers."""

    index: int
    units: tuple[str, ...]
    labels: tuple[Label, ...]


def fuse(space: SchemeSpace, profiles: Iterable[Sequence[LayerTime]]) -> tuple[Block, ...]:
    """Join units that stand in one kernel of any profile; the order is that of the graph."""
    parent = {unit.id: unit.id for unit in space.units}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for layers in profiles:
        for layer in layers:
            members = [space.unit_of[node] for node in layer.nodes if node in space.unit_of]
            for other in members[1:] if not layer.boundary else ():
                parent[root(other)] = root(members[0])
    groups: dict[str, list[str]] = {}
    for unit in space.units:
        groups.setdefault(root(unit.id), []).append(unit.id)
    return tuple(
        Block(index=index, units=tuple(names), labels=_offered(space, names))
        for index, names in enumerate(groups.values())
    )


def _offered(space: SchemeSpace, names: Sequence[str]) -> tuple[Label, ...]:
    offered = {label for name in names for label in space.by_id[name].labels}
    return tuple(label for label in LABELS if label in offered)


def unit_labels(space: SchemeSpace, blocks: Sequence[Block], choice: Sequence[Label]) -> dict[str, Label]:
    """Labels of units from labels of blocks. ``in-only`` touches only the units that offer it."""
    labels: dict[str, Label] = {}
    for block, label in zip(blocks, choice, strict=True):
        for name in block.units:
            unit = space.by_id[name]
            if label == "in+out":
                labels[name] = unit.full
            elif label in unit.labels:
                labels[name] = label
    return labels


class CostModel:
    """Time of each block under each label, plus what it costs to cross between float and integer.

    A block's time is the mean of what profiles showed of it under that label; a label never seen costs what
    the float kernel costs. Times are in milliseconds of one run. A tensor that is made in one world and read
    in the other costs a conversion, whose time comes from the conversion kernels in the profiles: its own
    where seen, else the median per element.
    """

    def __init__(self, space: SchemeSpace, blocks: Sequence[Block]) -> None:
        self.space = space
        self.blocks = tuple(blocks)
        self._block_of = {node: b.index for b in blocks for u in b.units for node in space.by_id[u].nodes}
        self._times: list[dict[Label, list[float]]] = [{} for _ in blocks]
        self._crossing: dict[str, list[float]] = {}
        self._typical: float | None = None  # milliseconds an element of a conversion
        self._edges = self._find_edges()
        self._elements = {edge.tensor: edge.elements for edge in self._edges}

    def learn(self, trial: Trial, labels: Mapping[str, Label]) -> None:
        """Add one profiled build, made with these unit labels."""
        if not trial.layers:
            return
        self._typical = None
        spent = [0.0] * len(self.blocks)
        for layer in trial.layers:
            if layer.boundary:
                for tensor in layer.tensors:
                    self._crossing.setdefault(tensor, []).append(layer.milliseconds / len(layer.tensors))
                continue
            owners = {self._block_of[node] for node in layer.nodes if node in self._block_of}
            for owner in owners:
                spent[owner] += layer.milliseconds / len(owners)
        for block, milliseconds in zip(self.blocks, spent, strict=True):
            self._times[block.index].setdefault(self._label_of(block, labels), []).append(milliseconds)

    def compose(self, share: float) -> list[Label]:
        """The labelling with the least predicted time when crossings count with ``share`` of their cost."""
        starts = [[self._pick(block, label) for block in self.blocks] for label in LABELS]
        starts.append([self._quickest(block) for block in self.blocks])
        settled = [self._descend(start, share) for start in starts]
        return min(settled, key=lambda choice: self.predict(choice, share))

    def predict(self, choice: Sequence[Label], share: float = 1.0) -> float:
        """Predicted milliseconds of the blocks and crossings of a labelling."""
        blocks = sum(self._time(block, label) for block, label in zip(self.blocks, choice, strict=True))
        return blocks + share * sum(self._cost(edge, choice) for edge in self._edges)

    def _label_of(self, block: Block, labels: Mapping[str, Label]) -> Label:
        given = [labels.get(name, "fp") for name in block.units]
        return "in+out" if "in+out" in given else "in-only" if "in-only" in given else "fp"

    def _pick(self, block: Block, label: Label) -> Label:
        return label if label in block.labels else "fp"

    def _quickest(self, block: Block) -> Label:
        return min(block.labels, key=partial(self._time, block))

    def _time(self, block: Block, label: Label) -> float:
        seen = self._times[block.index]
        values = seen.get(label) or seen.get("fp")
        return float(np.mean(values)) if values else 0.0

    def _descend(self, start: Sequence[Label], share: float) -> list[Label]:
        """Change one block at a time to its best label among its neighbours' until nothing improves."""
        choice = list(start)
        touching: list[list[_Edge]] = [[] for _ in self.blocks]
        for edge in self._edges:
            for index in edge.blocks:
                touching[index].append(edge)
        for _ in range(SWEEPS):
            before = list(choice)
            for block in self.blocks:
                choice[block.index] = self._best_label(block, choice, touching[block.index], share)
            if choice == before:
                break
        return choice

    def _best_label(self, block: Block, choice: list[Label], edges: Sequence[_Edge], share: float) -> Label:
        current = choice[block.index]
        costs = {}
        for label in block.labels:
            choice[block.index] = label
            costs[label] = self._time(block, label) + share * sum(self._cost(edge, choice) for edge in edges)
        choice[block.index] = current
        best = min(block.labels, key=costs.__getitem__)
        return best if costs[best] < costs[current] else current

    def _cost(self, edge: _Edge, choice: Sequence[Label]) -> float:
        """What a tensor costs to convert: once where it is made float and read as integer, or the reverse."""
        made_integer = edge.producer is not None and choice[edge.producer] == "in+out"
        readers = {choice[index] != "fp" for index in edge.consumers}
        if edge.read_outside:
            readers.add(False)
        return self._crossing_ms(edge) if (not made_integer) in readers else 0.0

    def _crossing_ms(self, edge: _Edge) -> float:
        seen = self._crossing.get(edge.tensor)
        return float(np.mean(seen)) if seen else self._per_element() * edge.elements

    def _per_element(self) -> float:
        if self._typical is None:
            rates = [
                np.mean(ms) / self._elements[t] for t, ms in self._crossing.items() if self._elements.get(t)
            ]
            self._typical = float(np.median(rates)) if rates else 0.0
        return self._typical

    def _find_edges(self) -> list[_Edge]:
        model, edges = self.space.model, []
        for tensor in sorted(self.space.tensors):
            ends = [self._block_of.get(end.node) for end in model.consumers.get(tensor, ())]
            maker = model.producer.get(tensor)
            producer = self._block_of.get(maker.name) if maker else None
            consumers = tuple(sorted({e for e in ends if e is not None and e != producer}))
            outside = None in ends or tensor in model.outputs or tensor in model.subgraph_reads
            if consumers or (outside and producer is not None):
                size = float(np.prod([d or 1 for d in model.shape(tensor) or ()]))
                edges.append(_Edge(tensor, size, producer, consumers, outside))
        return edges


@dataclass(frozen=True, slots=True)
class _Edge:
    """A tensor between blocks. ``read_outside``: also read where nothing is quantized."""

    tensor: str
    elements: float
    producer: int | None
    consumers: tuple[int, ...]
    read_outside: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indexes of the blocks it touches."""
        return self.consumers if self.producer is None else (self.producer, *self.consumers)
