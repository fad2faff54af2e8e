"""Patterns: what regions have in common. May import floors 0 and 1.

Two regions share a pattern when their nodes can be paired so that operators, attributes, element types,
shapes (if asked for), input slots and the boundary agree. Operands of commutative operators may change
places. Values of constants do not count, nor whether two inputs share one constant, and bodies of If,
Loop and Scan are told by their operators only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model, Node
from qdqspec.regions.coloring import Edge, Puzzle, canonical_order
from qdqspec.regions.flow import Flow, attribute_text, flow_of
from qdqspec.regions.ops import COMMUTATIVE
from qdqspec.regions.text import pattern_text
from qdqspec.registry import did_you_mean

Granularity: TypeAlias = Literal["structure", "structure+shapes"]
VERSION = "p1"
_BODY_SLOT = -1  # the tensors that a body reads have no order of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A class of isomorphic regions.

    ``order`` lists the node names of the region it was made from; in two regions of equal digest, nodes
    at equal places correspond.
    """

    digest: str
    text: str
    order: tuple[str, ...]


def canonical(model: Model, nodes: Iterable[str], granularity: Granularity = "structure+shapes") -> Pattern:
    """The pattern of a set of nodes. Equal digests mean isomorphic; isomorphic sets have equal digests.

    The second half is given up for sets of thousands of nodes that are full of symmetries, and only
    there: their digest may depend on the order in which nodes are listed.
    Raises `ModelError` for a name that is not a node of the model, or is a ``Constant``.
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
    """Makes patterns of one model's node sets; labels of nodes are made once."""

    def __init__(self, flow: Flow, granularity: Granularity = "structure+shapes") -> None:
        self.place = {index: i for i, index in enumerate(flow.order)}
        self._flow = flow
        self._shapes = granularity == "structure+shapes"
        self._made_by = {
            t: (i, k) for i in flow.order for k, t in enumerate(flow.model.nodes[i].outputs) if t
        }
        self._fed = frozenset(flow.model.inputs)
        self._visible = frozenset(flow.model.outputs)
        self._read_by: dict[str, list[int]] = {}
        for index in flow.order:
            for tensor in flow.reads[index]:
                self._read_by.setdefault(tensor, []).append(index)
        self._own: dict[int, str] = {}
        self._types: dict[str, str] = {"": "-"}

    def make(self, indices: Iterable[int]) -> Pattern:
        """The pattern of nodes given by index."""
        members = sorted(indices, key=self.place.__getitem__)
        nodes = [self._flow.model.nodes[i] for i in members]
        puzzle = self._puzzle(members, nodes)
        order, certificate = canonical_order(puzzle)
        digest = hashlib.sha256(certificate.encode()).hexdigest()[:16]
        shared = len(puzzle.labels) - len(members)
        real = [vertex - shared for vertex in order if vertex >= shared]
        return Pattern(
            digest=f"{VERSION}-{digest}",
            text=self._text(members),
            order=tuple(nodes[i].name for i in real),
        )

    def _text(self, members: Sequence[int]) -> str:
        """Without what was only carried along, which would hide the operators that matter."""
        told = [i for i in members if i not in self._flow.carried] or members
        local = {index: i for i, index in enumerate(told)}
        feeds = [[local[p] for p in self._flow.producers[i] if p in local] for i in told]
        return pattern_text([self._flow.model.nodes[i].op_type for i in told], feeds)

    def _puzzle(self, members: Sequence[int], nodes: Sequence[Node]) -> Puzzle:
        """Vertices are first the outside tensors that several inputs share, then the nodes."""
        local = {index: i for i, index in enumerate(members)}
        ends = [self._ends(node) for node in nodes]
        outside = self._shared_outside(ends, local)
        labels = [f"outside {self._type(t)}" for t in outside]
        edges: list[list[Edge]] = [[] for _ in outside]
        for node, row in zip(nodes, ends, strict=True):
            inputs: list[str] = []
            feeds: list[Edge] = []
            for slot, tensor in row:
                maker, output = self._made_by.get(tensor, (-1, 0))
                if maker in local:
                    feeds.append(Edge(slot, local[maker] + len(outside), output))
                elif tensor in outside:
                    feeds.append(Edge(slot, outside[tensor], 0))
                else:
                    inputs.append(f"{slot}:{self._kind(tensor)}{self._type(tensor)}")
            labels.append(f"{self._label(node)}({','.join(sorted(inputs))})>{self._seen(node, local)}")
            edges.append(feeds)
        return Puzzle(labels, edges)

    def _shared_outside(
        self, ends: Sequence[Sequence[tuple[int, str]]], local: dict[int, int]
    ) -> dict[str, int]:
        uses: dict[str, int] = {}
        for row in ends:
            for _, tensor in row:
                if self._kind(tensor) == "t" and self._made_by.get(tensor, (-1, 0))[0] not in local:
                    uses[tensor] = uses.get(tensor, 0) + 1
        shared = [tensor for tensor, count in uses.items() if count > 1]
        return {tensor: i for i, tensor in enumerate(shared)}

    def _ends(self, node: Node) -> list[tuple[int, str]]:
        loose = node.op_type in COMMUTATIVE
        ends = [(0 if loose else slot, tensor) for slot, tensor in enumerate(node.inputs)]
        if _has_body(node):
            inner = self._flow.reads[node.index]
            ends += [(_BODY_SLOT, tensor) for tensor in inner if tensor not in node.inputs]
        return ends

    def _kind(self, tensor: str) -> str:
        """``t`` for a tensor that is computed or fed, ``c`` for a constant, empty for an input left out."""
        if not tensor:
            return ""
        return "t" if tensor in self._made_by or tensor in self._fed else "c"

    def _label(self, node: Node) -> str:
        if node.index not in self._own:
            attributes = ",".join(sorted(map(attribute_text, node.proto.attribute)))
            outputs = ",".join(self._type(t) for t in node.outputs)
            self._own[node.index] = f"{node.domain}:{node.op_type}[{attributes}]{outputs}"
        return self._own[node.index]

    def _seen(self, node: Node, local: dict[int, int]) -> str:
        """Which outputs are seen outside, one sign each."""
        outer = self._read_by
        return "".join(
            "o" if t in self._visible or any(c not in local for c in outer.get(t, ())) else "."
            for t in node.outputs
        )

    def _type(self, tensor: str) -> str:
        if tensor not in self._types:
            known = self._flow.model.types.get(tensor)
            text = "?" if known is None else onnx.TensorProto.DataType.Name(known.elem_type)
            if known is not None and self._shapes and known.shape is not None:
                text += "x".join("?" if d is None else str(d) for d in known.shape).join("[]")
            self._types[tensor] = text
        return self._types[tensor]


def _has_body(node: Node) -> bool:
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return any(a.type in graphs for a in node.proto.attribute)
