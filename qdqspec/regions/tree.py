"""Turns blocks into regions: assigns the remaining nodes, ids, boundaries and patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qdqspec.graph.ops import MOVING_OPS
from qdqspec.regions.blocks import Block, Composite, Leaf, leaves
from qdqspec.regions.flow import Flow
from qdqspec.regions.pattern import PatternMaker
from qdqspec.types import Region, RegionType


def regions_of_blocks(flow: Flow, blocks: Sequence[Block]) -> tuple[Region, ...]:
    """All regions of settled blocks, parents before children."""
    root = Composite(_pruned(blocks))
    if not root.children:
        return ()
    return tuple(_Namer(flow).walk(root, "r0", None))


def settle(flow: Flow, found: Sequence[Leaf]) -> None:
    """Assign each carried node, and each node of a leaf that only copies, to the leaf that uses it.

    Then each node of ``flow.order`` is in exactly one leaf.
    """
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
    for index in flow.order:  # in a part of the graph without a leaf
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
    """The blocks without those that lost all nodes, and without levels that hold one block only."""
    kept: list[Block] = []
    for block in blocks:
        if isinstance(block, Leaf):
            if block.nodes:
                kept.append(block)
        elif inside := _pruned(block.children):
            kept.append(inside[0] if len(inside) == 1 else Composite(inside))
    return kept


def _nodes_of(block: Block) -> list[int]:
    return block.nodes if isinstance(block, Leaf) else [i for leaf in leaves([block]) for i in leaf.nodes]


class _Namer:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._patterns = PatternMaker(flow)

    def walk(self, block: Block, name: str, parent: str | None) -> Iterator[Region]:
        """Regions of a block and all below, depth first. Levels are few: see `blocks.dissolve`."""
        children = block.children if isinstance(block, Composite) else []
        names = tuple(f"{name}.{i}" for i in range(len(children)))
        kind: RegionType = "ROOT" if parent is None else "COMPOSITE" if children else "LEAF"
        yield self._region(name, kind, parent, names, _nodes_of(block))
        for child, child_name in zip(children, names, strict=True):
            yield from self.walk(child, child_name, name)

    def _region(
        self, name: str, kind: RegionType, parent: str | None, children: tuple[str, ...], indices: list[int]
    ) -> Region:
        view = self._patterns.view(indices)
        solution = self._patterns.solution(view)
        nodes = self._flow.model.nodes
        return Region(
            id=name,
            type=kind,
            parent=parent,
            children=children,
            nodes=tuple([nodes[i].name for i in sorted(view.members)]),
            inputs=tuple(view.inputs),
            outputs=tuple(view.outputs),
            pattern=solution.digest,
            pattern_text=solution.text,
        )
