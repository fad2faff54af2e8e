"""Dominators and the structure tree are equal to those of a brute-force search by definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.graph.regions.dominators import DominatorTree, post_dominators


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """Predecessors of each vertex; 0 is the entry, the last is the exit, all others are on a path between them."""
    size = draw(st.integers(2, 9))
    before = [[]] + [
        sorted(draw(st.sets(st.integers(0, v - 1), min_size=1, max_size=3))) for v in range(1, size)
    ]
    fed = {p for row in before for p in row}
    before.append([v for v in range(size) if v not in fed] or [size - 1])
    return before


def successors_of(before: list[list[int]]) -> list[list[int]]:
    return [[v for v, row in enumerate(before) if u in row] for u in range(len(before))]


def on_every_path(after: list[list[int]], start: int, end: int) -> set[int]:
    ways = [{end}] if start == end else [w for s in after[start] for w in [on_every_path(after, s, end)] if w]
    return {start} | set.intersection(*ways) if ways else set()


@given(graphs())
def test_immediate_dominators_by_definition(before):
    after = successors_of(before)
    last = len(before) - 1
    tree = DominatorTree()
    for row in before[1:]:
        tree.add(row)
    for vertex in range(1, last + 1):
        strict = on_every_path(after, 0, vertex) - {vertex}
        assert tree.parent[vertex] == max(strict)
    post = post_dominators(after)
    for vertex in range(last):
        assert post[vertex] == min(on_every_path(after, vertex, last) - {vertex})


@pytest.mark.parametrize("depth", [3000])
def test_deep_nesting_needs_no_recursion(depth):
    """A fork inside a fork inside a fork: innermost in the middle."""
    tree = DominatorTree()
    for vertex in range(1, depth + 1):
        tree.add([vertex - 1])
    for vertex in range(depth, 0, -1):
        joined = tree.add([len(tree.parent) - 1, vertex])
        assert joined == vertex
