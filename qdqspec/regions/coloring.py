"""Canonical labelling of a small labelled acyclic graph.

Colour refinement along and against the edges runs until the partition is stable. Remaining ties are resolved
by individualizing each vertex of a tied class in turn and keeping the smallest certificate, as in B. D.
McKay, "Practical graph isomorphism", Congressus Numerantium 30 (1981). A branch whose first leaf was seen
before is an automorphic image and is not searched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

from qdqspec.regions.flow import short_hash

Colors: TypeAlias = list[bytes]
EFFORT = 50_000  # vertex visits spent on ties; beyond that, symmetric vertices keep the order of their input


# an input: its slot, the vertex that produces it, the index of the output
InEdge: TypeAlias = tuple[int, int, int]
# by vertex: label of the edge, and the vertex at its other end
Tagged: TypeAlias = list[list[tuple[bytes, int]]]


class Puzzle:
    """A labelled acyclic graph: vertices in topological order, their labels, and the edges into each."""

    def __init__(self, labels: Sequence[str], edges: Sequence[Sequence[InEdge]]) -> None:
        self.labels = labels
        self.edges = edges
        ways = {(slot, output) for row in edges for slot, _, output in row}
        tags = {way: b"%d.%d." % way for way in ways}
        self.up: Tagged = [[(tags[slot, output], feeding) for slot, feeding, output in row] for row in edges]
        self.depth: list[int] = []
        for row in edges:
            deepest = -1
            for _, feeding, _ in row:
                if self.depth[feeding] > deepest:
                    deepest = self.depth[feeding]
            self.depth.append(deepest + 1)

    @cached_property
    def down(self) -> Tagged:
        """The same edges by producer. Computed on demand: most graphs need no backward sweep."""
        down: Tagged = [[] for _ in self.labels]
        for vertex, row in enumerate(self.up):
            for tag, feeding in row:
                down[feeding].append((tag, vertex))
        return down


def canonical_order(puzzle: Puzzle) -> tuple[list[int], str]:
    """Vertices in canonical order, and the certificate: the whole graph written in that order.

    Graphs with equal certificates are isomorphic.
    """
    told = {label: short_hash(label.encode()) for label in set(puzzle.labels)}
    colors = _refined(puzzle, [told[label] for label in puzzle.labels])
    ties = len(colors) - len(set(colors))
    if not ties:
        return _written(puzzle, colors)
    if ties * len(colors) > EFFORT:
        return _written_in(puzzle, _greedy_order(puzzle, colors))
    return _Search(puzzle).best(colors)[0]


class _Search:
    def __init__(self, puzzle: Puzzle) -> None:
        self._puzzle = puzzle
        self._left = EFFORT

    def best(self, colors: Colors) -> tuple[tuple[list[int], str], set[str]]:
        """The smallest certificate in this subtree of the search, and all certificates found."""
        tied = _smallest_tie(colors)
        if not tied:
            written = _written(self._puzzle, colors)
            return written, {written[1]}
        found, seen = self.best(self._told_apart(colors, tied[0]))
        for vertex in tied[1:]:
            if self._left < 0:
                break
            branch = self._told_apart(colors, vertex)
            if self._first_leaf(branch) in seen:
                continue
            other, more = self.best(branch)
            seen |= more
            found = min(found, other, key=lambda written: written[1])
        return found, seen

    def _told_apart(self, colors: Colors, vertex: int) -> Colors:
        self._left -= len(colors)
        changed = list(colors)
        changed[vertex] = short_hash(colors[vertex] + b"\0chosen")
        return _refined(self._puzzle, changed)

    def _first_leaf(self, colors: Colors) -> str:
        while tied := _smallest_tie(colors):
            colors = self._told_apart(colors, tied[0])
        return _written(self._puzzle, colors)[1]


def _smallest_tie(colors: Colors) -> list[int]:
    classes: dict[bytes, list[int]] = {}
    for vertex, color in enumerate(colors):
        classes.setdefault(color, []).append(vertex)
    ties = [(len(members), color) for color, members in classes.items() if len(members) > 1]
    return classes[min(ties)[1]] if ties else []


def _refined(puzzle: Puzzle, colors: Colors) -> Colors:
    """Refine colours by the producers and the consumers of each vertex until the colouring is stable.

    Each sweep propagates a difference through the whole depth, down and up, so that few sweeps are needed
    however deep the graph is.
    """
    count = len(set(colors))
    while count < len(colors):
        before = count
        colors = _swept(puzzle.up, range(len(colors)), colors)
        if (count := len(set(colors))) == len(colors):
            break
        colors = _swept(puzzle.down, range(len(colors) - 1, -1, -1), colors)
        if (count := len(set(colors))) == before:
            break
    return colors


def _swept(edges: Tagged, order: Iterable[int], colors: Colors) -> Colors:
    fresh = list(colors)
    for vertex in order:
        told, row = colors[vertex], edges[vertex]
        if len(row) == 1:
            tag, end = row[0]
            told += b"\0" + tag + fresh[end]
        elif row:
            told = b"\0".join([told, *sorted([tag + fresh[end] for tag, end in row])])
        fresh[vertex] = short_hash(told)
    return fresh


def _written(puzzle: Puzzle, colors: Colors) -> tuple[list[int], str]:
    return _written_in(puzzle, sorted(range(len(colors)), key=lambda v: (puzzle.depth[v], colors[v])))


def _written_in(puzzle: Puzzle, order: list[int]) -> tuple[list[int], str]:
    place = [0] * len(order)
    for i, vertex in enumerate(order):
        place[vertex] = i
    rows = []
    for vertex in order:
        row = puzzle.edges[vertex]
        if len(row) == 1:  # same text as that of the list below, which takes three times as long to write
            slot, feeding, output = row[0]
            rows.append(f"{puzzle.labels[vertex]}<[({slot}, {place[feeding]}, {output})]")
        else:
            ends = sorted([(slot, place[feeding], output) for slot, feeding, output in row])
            rows.append(f"{puzzle.labels[vertex]}<{ends}")
    return order, "\n".join(rows)


def _greedy_order(puzzle: Puzzle, colors: Colors) -> list[int]:
    """A topological order by colour that keeps the vertices of one symmetric branch together."""
    missing = [len(row) for row in puzzle.edges]
    place: dict[int, int] = {}

    def entry(vertex: int) -> tuple[int, bytes, list[int], int]:
        fed_by = sorted(place[feeding] for _, feeding, _ in puzzle.edges[vertex])
        return puzzle.depth[vertex], colors[vertex], fed_by, vertex

    ready = [entry(v) for v, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        vertex = heapq.heappop(ready)[-1]
        place[vertex] = len(place)
        for _, fed in puzzle.down[vertex]:
            missing[fed] -= 1
            if not missing[fed]:
                heapq.heappush(ready, entry(fed))
    return list(place)
