"""Dominators of an acyclic graph, and the chains of single-entry single-exit regions they define.

Vertices are numbered in topological order.

In an acyclic graph the immediate dominator of a vertex is the nearest common ancestor of its predecessors in
the dominator tree built so far, so one pass in topological order is exact, without iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class DominatorTree:
    """A dominator tree that grows by one vertex at a time, in topological order. Vertex 0 is the entry."""

    def __init__(self) -> None:
        self.parent = [0]
        self._depth = [0]

    def add(self, predecessors: Sequence[int]) -> int:
        """Add the next vertex; return its immediate dominator (the entry if it has no predecessor)."""
        dominator = self.meet(predecessors)
        self.parent.append(dominator)
        self._depth.append(self._depth[dominator] + 1)
        return dominator

    def meet(self, vertices: Iterable[int]) -> int:
        """The nearest common dominator of the vertices."""
        parent, depth = self.parent, self._depth
        found = -1
        for vertex in vertices:
            found = vertex if found < 0 else found
            while found != vertex:
                if depth[found] < depth[vertex]:
                    found, vertex = vertex, found
                found = parent[found]
        return max(found, 0)


def post_dominators(successors: Sequence[Iterable[int]]) -> list[int]:
    """The immediate post-dominator of every vertex; the last vertex is the exit and its own."""
    last = len(successors) - 1
    tree = DominatorTree()
    for vertex in range(last - 1, -1, -1):
        tree.add([last - s for s in successors[vertex]])
    return [last - p for p in reversed(tree.parent)]


@dataclass(frozen=True, slots=True)
class Chains:
    """The program structure tree of an acyclic graph, as chains.

    ``following[a] == b`` where ``a`` immediately dominates ``b`` and ``b`` immediately post-dominates ``a``;
    such links form disjoint chains. ``inside[a]`` are the heads of the chains strictly between ``a`` and
    ``following[a]``. -1 means none.
    """

    following: tuple[int, ...]
    inside: dict[int, list[int]]


def structure_tree(dominator: Sequence[int], post_dominator: Sequence[int]) -> Chains:
    """Nest all single-entry single-exit regions (Johnson, Pearson, Pingali, PLDI 1994), in linear time.

    The parent of a chain is the link from the nearest dominator of its head that has one to the end of that
    link. No other region can be smaller: in an acyclic graph, each vertex that ``a`` dominates and that is
    not reachable through ``following[a]`` lies before it.
    """
    size = len(dominator)
    following, preceding = [-1] * size, [-1] * size
    for vertex in range(1, size):
        above = dominator[vertex]
        if post_dominator[above] == vertex:
            following[above], preceding[vertex] = vertex, above
    container = [-1] * size
    inside: dict[int, list[int]] = {}
    for vertex in range(1, size):
        above = dominator[vertex]
        if preceding[vertex] >= 0:
            container[vertex] = container[above]
            continue
        container[vertex] = above if following[above] >= 0 else container[above]
        inside.setdefault(container[vertex], []).append(vertex)
    return Chains(tuple(following), inside)
