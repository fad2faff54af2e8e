"""Blocks: regions under construction, and how small ones are merged.

A `Leaf` is a run of nodes; a `Composite` holds blocks. Both are mutable while a search builds them and hold
node indices; `qdqspec.regions.search` turns them into regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

TINY = 2  # a leaf of at most so many nodes joins a neighbour if both fit within the limit

SHARE = 0.5


@dataclass(slots=True)
class Leaf:
    """Nodes that stay in one region.

    A ``closed`` leaf is a whole branching structure and is not extended. A ``light`` leaf has no anchor.
    """

    nodes: list[int]
    closed: bool = False
    light: bool = False

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.nodes)


@dataclass(slots=True)
class Composite:
    """Blocks between one entry and one exit. ``size`` counts nodes on all levels."""

    children: list[Block]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(child.size for child in self.children)


Block: TypeAlias = Leaf | Composite
# Whether two sets of nodes are adjacent in the data flow: see `Flow.linked`.
Linked: TypeAlias = Callable[[Iterable[int], Iterable[int]], bool]


def leaves(blocks: Iterable[Block]) -> Iterable[Leaf]:
    """All leaves in order, at any depth."""
    pending = list(blocks)[::-1]
    while pending:
        block = pending.pop()
        if isinstance(block, Leaf):
            yield block
        else:
            pending.extend(reversed(block.children))


def dissolve(root: Composite, limit: int, linked: Linked) -> None:
    """Replace composites that make up nearly all of their parent by their children, below ``root``, in place.

    Such a level carries no information. Without it, each level holds at most `SHARE` of the nodes of the
    level above, so that all levels together hold at most 1 / (1 - SHARE) times the nodes, however deep they
    nest.
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
    """Merge consecutive leaves up to ``limit`` nodes, and cut longer ones."""
    if len(blocks) == 1 and blocks[0].size <= limit:
        return list(blocks)
    packed: list[Block] = []
    for is_open, group in groupby(blocks, key=lambda b: isinstance(b, Leaf) and not b.closed):
        run = list(group)
        packed += _fill([b for b in run if isinstance(b, Leaf)], limit) if is_open else run
    return packed


def join_tiny(blocks: Sequence[Block], limit: int, linked: Linked) -> list[Block]:
    """Merge each tiny leaf with the next leaf, or else with the previous one, if both fit into one.

    A closed leaf takes in only leaves without an anchor, so that equal blocks of a model stay equal.
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
        # Exceed the goal only where that is closer to it than stopping before it.
        now = len(filled[-1])
        if now and (now + len(piece) > limit or now + len(piece) - goal > goal - now):
            filled.append([])
        filled[-1] += piece
    return [Leaf(nodes, light=all(leaf.light for leaf in run)) for nodes in filled]


def _cut(nodes: list[int], limit: int) -> list[list[int]]:
    count = -(-len(nodes) // limit)
    size = -(-len(nodes) // max(count, 1))
    return [nodes[i : i + size] for i in range(0, len(nodes), size)]
