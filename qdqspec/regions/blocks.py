"""Blocks: regions in the making, and how small ones are packed together.

A `Leaf` is a run of nodes; a `Composite` holds blocks. Both are mutable while a search builds them and
hold node indices; `qdqspec.regions.tree` turns them into regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

TINY = 2  # a leaf of so few nodes decides nothing alone: it joins a neighbour if both fit

SHARE = 0.5


@dataclass(slots=True)
class Leaf:
    """Nodes that stay together.

    A ``closed`` one is a whole branching structure and is not filled up. A ``light`` one has no anchor.
    """

    nodes: list[int]
    closed: bool = False
    light: bool = False

    @property
    def size(self) -> int:
        """How many nodes it has."""
        return len(self.nodes)


@dataclass(slots=True)
class Composite:
    """Blocks between one entry and one exit. ``size`` counts nodes on all levels."""

    children: list[Block]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(child.size for child in self.children)


Block: TypeAlias = Leaf | Composite
# Whether two sets of nodes touch in the data flow: see `Flow.linked`.
Linked: TypeAlias = Callable[[Iterable[int], Iterable[int]], bool]


def leaves(blocks: Iterable[Block]) -> Iterable[Leaf]:
    """All leaves in order, however deep they are."""
    pending = list(blocks)[::-1]
    while pending:
        block = pending.pop()
        if isinstance(block, Leaf):
            yield block
        else:
            pending.extend(reversed(block.children))


def dissolve(root: Composite, limit: int, linked: Linked) -> None:
    """Splice composites that are nearly all of what they stand in into it, below ``root``, in place.

    Such a level tells a reader nothing. Without them every level is at most `SHARE` of the one above,
    so that all levels together hold no more than 1 / (1 - SHARE) times the nodes, however deep they nest.
    """
    pending = [root]
    while pending:
        composite = pending.pop()
        kept: list[Block] = []
        waiting = composite.children[::-1]
        while waiting:
            block = waiting.pop()
            if isinstance(block, Composite) and block.size > SHARE * composite.size:
                waiting.extend(reversed(block.children))
            else:
                kept.append(block)
        composite.children = join_tiny(kept, limit, linked)
        pending.extend(block for block in composite.children if isinstance(block, Composite))


def pack_run(blocks: Sequence[Block], limit: int) -> list[Block]:
    """Fill leaves that follow each other up to ``limit`` nodes; longer ones are cut."""
    if len(blocks) == 1 and blocks[0].size <= limit:
        return list(blocks)
    packed: list[Block] = []
    for is_open, group in groupby(blocks, key=lambda b: isinstance(b, Leaf) and not b.closed):
        run = list(group)
        packed += _fill([b for b in run if isinstance(b, Leaf)], limit) if is_open else run
    return packed


def join_tiny(blocks: Sequence[Block], limit: int, linked: Linked) -> list[Block]:
    """Merge each tiny leaf with the next leaf, or else the one before, where both fit into one.

    A whole branching takes in only what has no anchor, so that equal blocks of a model stay equal.
    """
    if len(blocks) < 2:
        return list(blocks)
    joined: list[Block] = []  # last block first
    for block in reversed(blocks):
        after = joined[-1] if joined else None
        if isinstance(after, Leaf) and isinstance(block, Leaf) and _may_join(block, after, limit, linked):
            whole = block.nodes + after.nodes
            joined[-1] = Leaf(whole, closed=block.closed or after.closed, light=block.light and after.light)
        else:
            joined.append(block)
    return joined[::-1]


def _may_join(a: Leaf, b: Leaf, limit: int, linked: Linked) -> bool:
    if a.size + b.size > limit or min(a.size, b.size) > TINY:
        return False
    if (a.closed or b.closed) and not any(leaf.light and leaf.size <= TINY for leaf in (a, b)):
        return False
    return linked(a.nodes, b.nodes)


def _fill(run: Sequence[Leaf], limit: int) -> list[Block]:
    """Cut a run into leaves of about equal size, at unit borders where units are small enough."""
    pieces = [piece for leaf in run for piece in _cut(leaf.nodes, limit)]
    total = sum(map(len, pieces))
    count = -(-total // limit)
    goal = total / count
    filled: list[list[int]] = [[]]
    for piece in pieces:
        # Overshoot the goal only by less than stopping short of it would miss.
        now = len(filled[-1])
        if now and (now + len(piece) > limit or now + len(piece) - goal > goal - now):
            filled.append([])
        filled[-1] += piece
    return [Leaf(nodes, light=all(leaf.light for leaf in run)) for nodes in filled]


def _cut(nodes: list[int], limit: int) -> list[list[int]]:
    count = -(-len(nodes) // limit)
    size = -(-len(nodes) // max(count, 1))
    return [nodes[i : i + size] for i in range(0, len(nodes), size)]
