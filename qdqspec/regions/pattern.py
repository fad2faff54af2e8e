"""Patterns: equivalence classes of isomorphic regions.

Two regions share a pattern when their nodes can be paired so that operators, attributes, element types,
shapes (if asked for), input slots and the boundary agree. Without shapes, the number of groups of a depthwise
convolution is ignored too. Operands of commutative operators may change places. Values of constants do not
count, nor whether two inputs share one constant; bodies of If, Loop and Scan are represented by their
operators only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model
from qdqspec.regions.coloring import InEdge, Puzzle, canonical_order
from qdqspec.regions.dominators import Chains, DominatorTree, post_dominators, structure_tree
from qdqspec.regions.flow import Flow, flow_of
from qdqspec.regions.views import NodeView, Viewer
from qdqspec.registry import did_you_mean

PatternGranularity: TypeAlias = Literal["structure", "structure+shapes"]
VERSION = "p1"
LONGEST = 40  # operators that a text has one by one; larger patterns are written as counts
REPEATING = 200  # nodes; larger blocks rarely repeat, and caching them costs memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A class of isomorphic regions.

    ``order`` lists the node names of the region it was made from; in two regions of equal digest, nodes at
    equal positions correspond.
    """

    digest: str
    text: str
    order: tuple[str, ...]


def canonical(
    model: Model, nodes: Iterable[str], granularity: PatternGranularity = "structure+shapes"
) -> Pattern:
    """The pattern of a set of nodes. Equal digests mean isomorphic; isomorphic sets have equal digests.

    The second half does not hold for highly symmetric sets, where the number of symmetric nodes times the
    number of all nodes is above 50,000 (some 220 interchangeable branches): their digest may depend on the
    order in which nodes are listed. Raises `ModelError` for a name that is not a node of the model, or is a
    ``Constant``.
    """
    maker = PatternMaker(flow_of(model), granularity)
    indices = []
    for name in dict.fromkeys(nodes):
        node = model.by_name.get(name)
        if node is None or node.index not in maker.place:
            near = did_you_mean(name, list(model.by_name))
            raise ModelError(f"there is no node '{name}' to make a pattern of{near}", where=model.where)
        indices.append(node.index)
    return maker.make(indices)


class PatternMaker:
    """Makes patterns of one model's node sets. Facts about single nodes are computed once."""

    def __init__(self, flow: Flow, granularity: PatternGranularity = "structure+shapes") -> None:
        self._flow = flow
        self._viewer = Viewer(flow, with_shapes=granularity == "structure+shapes")
        self._solved: dict[tuple[object, ...], Solution] = {}
        self.place = self._viewer.place
        self.view = self._viewer.view

    def make(self, indices: Iterable[int]) -> Pattern:
        """The pattern of nodes given by index."""
        view = self.view(indices)
        order, digest, text = self.solution(view)
        shared = len(order) - len(view.members)
        names = (self._flow.model.nodes[view.members[v - shared]].name for v in order if v >= shared)
        return Pattern(digest=digest, text=text, order=tuple(names))

    def solution(self, view: NodeView) -> Solution:
        """The pattern of a view. Cached, because most repeated blocks are equal before they are ordered."""
        if len(view.members) > REPEATING:
            return self._solve(view)
        key = tuple(view.kinds), tuple(view.feeds), tuple(view.seen)
        if key not in self._solved:
            self._solved[key] = self._solve(view)
        return self._solved[key]

    def _solve(self, view: NodeView) -> Solution:
        order, certificate = canonical_order(_puzzle(view))
        digest = hashlib.sha256(certificate.encode()).hexdigest()[:16]
        return Solution(order, f"{VERSION}-{digest}", self._text(view.members))

    def _text(self, members: Sequence[int]) -> str:
        """The text without carried nodes, which would hide the operators that matter."""
        carried, nodes = self._flow.carried, self._flow.model.nodes
        told = [i for i in members if i not in carried] or members
        op_types = [nodes[i].op_type for i in told]
        if len(told) > LONGEST:
            return counted_text(op_types)
        local = {index: i for i, index in enumerate(told)}
        feeds = [[local[p] for p in self._flow.producers[i] if p in local] for i in told]
        return pattern_text(op_types, feeds)


class Solution(NamedTuple):
    """A pattern by vertices of a `_puzzle`, in canonical order."""

    order: list[int]
    digest: str
    text: str


def _puzzle(view: NodeView) -> Puzzle:
    """The labelled graph of a view: first the outside tensors that several ends share, then the nodes."""
    shared = _shared_outside(view.feeds)
    labels = [""] * len(shared)
    edges: list[list[InEdge]] = [[] for _ in shared]
    made: list[tuple[int, int]] = []  # vertex and output, by number of tensor
    texts: dict[tuple[object, ...], str] = {}
    feeds = iter(view.feeds)
    for kind, seen in zip(view.kinds, view.seen, strict=True):
        fed, row = [], []
        for (slot, known), feed in zip(kind.ends, feeds, strict=False):  # as many as there are ends
            if feed >= 0:
                maker, output = made[feed]
                row.append((slot, maker, output))
            elif feed in shared:
                row.append((slot, shared[feed], 0))
                labels[shared[feed]] = f"outside {known}"
            else:
                fed.append((slot, known))
        made += [(len(labels), output) for output in range(kind.makes)]
        key = kind, seen, *fed
        text = texts.get(key)
        if text is None:
            text = texts[key] = kind.text(fed, seen)
        labels.append(text)
        edges.append(row)
    return Puzzle(labels, edges)


def _shared_outside(feeds: Sequence[int]) -> dict[int, int]:
    met: set[int] = set()
    shared: dict[int, int] = {}
    for feed in feeds:
        if feed < 0:
            if feed in met:
                shared.setdefault(feed, len(shared))
            met.add(feed)
    return shared


def pattern_text(op_types: Sequence[str], feeds: Sequence[Sequence[int]]) -> str:
    """Operators along the data flow, branches in parentheses; large graphs as counts of operators.

    Operators are in topological order; ``feeds`` lists for each the positions of its producers.
    """
    return counted_text(op_types) if len(op_types) > LONGEST else _Writer(op_types, feeds).write()


def counted_text(op_types: Sequence[str]) -> str:
    """Counts of operators by type: ``120 nodes: 40 Conv, 40 Relu, ...``."""
    common = sorted(Counter(op_types).items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count} {op}" for op, count in common[:5])
    return f"{len(op_types)} nodes: {shown}" + (", ..." if len(common) > 5 else "")


class _Writer:
    """Writes a pattern as text: ``Conv > Relu > (Conv | Conv > Relu) > Add``."""

    def __init__(self, op_types: Sequence[str], feeds: Sequence[Sequence[int]]) -> None:
        self._ops = op_types
        self._successors = _successors(feeds)
        tree = DominatorTree()
        for row in feeds:
            tree.add([p + 1 for p in row])
        last = len(feeds) + 1
        tree.add([v for v in range(1, last) if self._successors[v] == [last]])
        self._chains: Chains = structure_tree(tree.parent, post_dominators(self._successors))

    def write(self) -> str:
        """The text of the whole pattern."""
        return self._chain(0).removeprefix("(").removesuffix(")") if self._is_one_fork() else self._chain(0)

    def _is_one_fork(self) -> bool:
        return self._chains.following[0] == len(self._ops) + 1

    def _chain(self, vertex: int) -> str:
        parts = []
        while vertex >= 0:
            if 0 < vertex <= len(self._ops):
                parts.append(self._ops[vertex - 1])
            if branches := self._chains.inside.get(vertex):
                parts.append(self._fork(vertex, branches))
            vertex = self._chains.following[vertex]
        return " > ".join(parts)

    def _fork(self, vertex: int, heads: Sequence[int]) -> str:
        """The branches sorted by text, so that equal patterns have equal texts."""
        texts = sorted(self._chain(head) for head in heads)
        is_skipped = vertex > 0 and self._chains.following[vertex] in self._successors[vertex]
        if is_skipped:
            texts.append("skip")
        return f"({' | '.join(texts)})" if len(texts) > 1 or vertex == 0 else texts[0]


def _successors(feeds: Sequence[Sequence[int]]) -> list[list[int]]:
    last = len(feeds) + 1
    successors: list[list[int]] = [[] for _ in range(last + 1)]
    for here, row in enumerate(feeds, start=1):
        for producer in row:
            successors[producer + 1].append(here)
        if not row:
            successors[0].append(here)
    for vertex in range(1, last):
        successors[vertex] = successors[vertex] or [last]
    return successors
