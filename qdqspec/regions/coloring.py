"""Canonical order of a small labelled acyclic graph. Standard library only; it knows nothing of ONNX.

Colours are refined along and against the edges until they split no further; what is still tied is told
apart by trying each vertex of a tied class in turn and keeping the smallest certificate, as in
B. D. McKay, "Practical graph isomorphism", Congressus Numerantium 30 (1981). A branch whose first leaf
was seen before is an automorphic image and is not searched.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Colors: TypeAlias = list[bytes]
EFFORT = 50_000  # vertex visits spent on ties before symmetric vertices are taken as they come


class Edge(NamedTuple):
    """An input: which slot, which vertex feeds it, by which of its outputs."""

    slot: int
    vertex: int
    output: int


@dataclass(slots=True)
class Puzzle:
    """Vertices in topological order: labels, and edges from the vertices that feed each."""

    labels: Sequence[str]
    edges: Sequence[Sequence[Edge]]
    turned: list[list[Edge]] = field(init=False)
    depth: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.turned = [[] for _ in self.labels]
        self.depth = []
        for vertex, row in enumerate(self.edges):
            self.depth.append(max((self.depth[e.vertex] + 1 for e in row), default=0))
            for edge in row:
                self.turned[edge.vertex].append(Edge(edge.slot, vertex, edge.output))


def canonical_order(puzzle: Puzzle) -> tuple[list[int], str]:
    """Vertices in canonical order, and the certificate: the whole graph written in that order.

    Equal certificates mean isomorphic graphs, always.
    """
    colors = _refined(puzzle, [_hash([label.encode()]) for label in puzzle.labels])
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
        """The smallest certificate below, and all certificates seen on the way."""
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
        changed[vertex] = _hash([colors[vertex], b"chosen"])
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
    """Split colours by what feeds a vertex and by what it feeds, to the stable colouring.

    Each sweep carries a difference all the way down and up again, so that few sweeps are needed
    however deep the graph is.
    """
    count = len(set(colors))
    while count < len(colors):
        colors = _swept(puzzle.edges, range(len(colors)), colors)
        colors = _swept(puzzle.turned, range(len(colors) - 1, -1, -1), colors)
        before, count = count, len(set(colors))
        if count == before:
            break
    return colors


def _swept(edges: Sequence[Sequence[Edge]], order: Iterable[int], colors: Colors) -> Colors:
    fresh = list(colors)
    for vertex in order:
        parts = [b"%d.%d." % (e.slot, e.output) + fresh[e.vertex] for e in edges[vertex]]
        parts.sort()
        fresh[vertex] = _hash([colors[vertex], *parts])
    return fresh


def _written(puzzle: Puzzle, colors: Colors) -> tuple[list[int], str]:
    return _written_in(puzzle, sorted(range(len(colors)), key=lambda v: (puzzle.depth[v], colors[v])))


def _written_in(puzzle: Puzzle, order: list[int]) -> tuple[list[int], str]:
    place = {vertex: i for i, vertex in enumerate(order)}
    rows = []
    for vertex in order:
        ends = sorted((e.slot, place[e.vertex], e.output) for e in puzzle.edges[vertex])
        rows.append(f"{puzzle.labels[vertex]}<{ends}")
    return order, "\n".join(rows)


def _greedy_order(puzzle: Puzzle, colors: Colors) -> list[int]:
    """A topological order by colour that keeps the vertices of one symmetric branch in step."""
    missing = [len(row) for row in puzzle.edges]
    place: dict[int, int] = {}

    def entry(vertex: int) -> tuple[int, bytes, list[int], int]:
        fed_by = sorted(place[e.vertex] for e in puzzle.edges[vertex])
        return puzzle.depth[vertex], colors[vertex], fed_by, vertex

    ready = [entry(v) for v, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        vertex = heapq.heappop(ready)[-1]
        place[vertex] = len(place)
        for edge in puzzle.turned[vertex]:
            missing[edge.vertex] -= 1
            if not missing[edge.vertex]:
                heapq.heappush(ready, entry(edge.vertex))
    return list(place)


def _hash(parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()
