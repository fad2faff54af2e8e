"""Turns blocks into regions: homes for the nodes that were carried, ids, boundaries, patterns.

May import floors 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qdqspec.graph.ops import MOVING_OPS
from qdqspec.regions.blocks import Block, Composite, Leaf, leaves
from qdqspec.regions.flow import Flow
from qdqspec.regions.pattern import PatternMaker
from qdqspec.types import Region, RegionType


def regions_of_blocks(flow: Flow, blocks: Sequence[Block]) -> tuple[Region, ...]:
    """All regions, parents before children. Every node of ``flow.order`` ends in exactly one leaf."""
    _settle(flow, list(leaves(blocks)))
    root = Composite(_pruned(blocks))
    if not root.children:
        return ()
    return tuple(_Namer(flow).walk(root, "r0", None))


def _settle(flow: Flow, found: Sequence[Leaf]) -> None:
    """Give each carried node, and each node of a leaf that only copies, to the leaf that uses it."""
    home = {index: leaf for leaf in found for index in leaf.nodes}
    idle = [leaf for leaf in found if not _computes(flow, leaf)]
    if len(idle) == len(found):
        idle = []
    for leaf in idle:
        for index in leaf.nodes:
            del home[index]
        leaf.nodes.clear()
    for index in reversed(flow.order):
        _adopt(flow.consumers[index], index, home)
    for index in flow.order:
        _adopt(flow.producers[index], index, home)
    for index in flow.order:  # in a part of the graph with no leaf of its own
        if index not in home:
            home[index] = next(leaf for leaf in found if leaf.nodes)
            home[index].nodes.append(index)


def _adopt(neighbours: Sequence[int], index: int, home: dict[int, Leaf]) -> None:
    if index in home:
        return
    leaf = next((home[n] for n in neighbours if n in home), None)
    if leaf is not None:
        home[index] = leaf
        leaf.nodes.append(index)


def _computes(flow: Flow, leaf: Leaf) -> bool:
    return any(flow.model.nodes[index].op_type not in MOVING_OPS for index in leaf.nodes)


def _pruned(blocks: Sequence[Block]) -> list[Block]:
    """Without blocks that lost all nodes, and without levels that hold one block only."""
    kept: list[Block] = []
    for block in blocks:
        if isinstance(block, Leaf):
            if block.nodes:
                kept.append(block)
        elif inside := _pruned(block.children):
            kept.append(inside[0] if len(inside) == 1 else Composite(inside))
    return kept


class _Namer:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._patterns = PatternMaker(flow)
        self._results = frozenset(flow.model.outputs)

    def walk(self, block: Block, name: str, parent: str | None) -> Iterator[Region]:
        """Regions of a block and all below, depth first. Levels are few: see `blocks.dissolve`."""
        children = block.children if isinstance(block, Composite) else []
        names = tuple(f"{name}.{i}" for i in range(len(children)))
        kind: RegionType = "ROOT" if parent is None else "COMPOSITE" if children else "LEAF"
        yield self._region(name, kind, parent, names, [i for leaf in leaves([block]) for i in leaf.nodes])
        for child, child_name in zip(children, names, strict=True):
            yield from self.walk(child, child_name, name)

    def _region(
        self, name: str, kind: RegionType, parent: str | None, children: tuple[str, ...], nodes: list[int]
    ) -> Region:
        pattern = self._patterns.make(nodes)
        inputs, outputs = self._boundary(nodes)
        return Region(
            id=name,
            type=kind,
            parent=parent,
            children=children,
            nodes=tuple(self._flow.model.nodes[i].name for i in sorted(nodes)),
            inputs=inputs,
            outputs=outputs,
            pattern=pattern.digest,
            pattern_text=pattern.text,
        )

    def _boundary(self, nodes: list[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensors that enter and leave, without constants, in the canonical order of the nodes."""
        members = set(nodes)
        ordered = sorted(members, key=self._patterns.place.__getitem__)
        made = {t for i in members for t in self._flow.model.nodes[i].outputs}
        entering = dict.fromkeys(t for i in ordered for t in self._flow.reads[i] if t not in made)
        leaving = [t for i in ordered for t in self._flow.model.nodes[i].outputs if self._leaves(t, members)]
        return tuple(entering), tuple(leaving)

    def _leaves(self, tensor: str, members: set[int]) -> bool:
        return tensor in self._results or not members.issuperset(self._flow.readers.get(tensor, ()))
