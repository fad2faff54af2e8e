"""Patterns: equivalence classes of isomorphic regions.

Two regions share a pattern when their nodes can be paired so that operators, attributes, element types,
shapes (if asked for), input slots and the boundary agree. Without shapes, the number of groups of a depthwise
convolution is ignored too. Operands of commutative operators may change places. Values of constants do not
count, nor whether two inputs share one constant; bodies of If, Loop and Scan are represented by their
operators only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model
from qdqspec.regions.coloring import Edge, Puzzle, canonical_order
from qdqspec.regions.flow import Flow, flow_of
from qdqspec.regions.text import LONGEST, counted_text, pattern_text
from qdqspec.regions.views import View, Viewer
from qdqspec.registry import did_you_mean

Granularity: TypeAlias = Literal["structure", "structure+shapes"]
VERSION = "p1"
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


def canonical(model: Model, nodes: Iterable[str], granularity: Granularity = "structure+shapes") -> Pattern:
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

    def __init__(self, flow: Flow, granularity: Granularity = "structure+shapes") -> None:
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

    def solution(self, view: View) -> Solution:
        """The pattern of a view. Cached, because most repeated blocks are equal before they are ordered."""
        if len(view.members) > REPEATING:
            return self._solve(view)
        key = tuple(view.kinds), tuple(view.feeds), tuple(view.seen)
        if key not in self._solved:
            self._solved[key] = self._solve(view)
        return self._solved[key]

    def _solve(self, view: View) -> Solution:
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


def _puzzle(view: View) -> Puzzle:
    """The labelled graph of a view: first the outside tensors that several ends share, then the nodes."""
    shared = _shared_outside(view.feeds)
    labels = [""] * len(shared)
    edges: list[list[Edge]] = [[] for _ in shared]
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
