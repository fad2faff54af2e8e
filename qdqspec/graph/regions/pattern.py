"""Patterns: equivalence classes of isomorphic regions.

Two regions share a pattern when their nodes can be paired so that operators, attributes, element types,
shapes (if asked for), input slots and the boundary agree. Without shapes, the number of groups of a depthwise
convolution is ignored too. Operands of commutative operators may change places. Values of constants do not
count, nor whether two inputs share one constant; bodies of If, Loop and Scan are represented by their
operators only.

Nodes are paired by canonical labelling of a small labelled acyclic graph: colour refinement along and against the edges
runs until the partition is stable. Of vertices that are tied then, the first gets a colour of its own, and the colours
are refined again, until no tie is left. Tied vertices are symmetric in models, so that any of them gives the same
text. Source: B. D. McKay, "Practical graph isomorphism", Congressus Numerantium 30 (1981), which tries all of them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx

from qdqspec.graph.model import TensorType
from qdqspec.graph.ops import COMMUTATIVE, is_commutative
from qdqspec.graph.protos import attribute_of
from qdqspec.graph.regions.flow import Flow, chains_of, short_hash

PatternGranularity: TypeAlias = Literal["structure", "structure+shapes"]
VERSION = "p1"
LONGEST = 40  # operators that a text has one by one; larger patterns are written as counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A class of isomorphic regions, and one region of the class.

    ``order`` lists the node names of the region; in two regions of equal digest, nodes at equal positions correspond.
    ``inputs`` and ``outputs`` are the tensors that enter and leave the region.
    """

    digest: str
    text: str
    order: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PatternMaker:
    """Makes patterns of one model's node sets. Facts about single nodes are computed once."""

    def __init__(self, flow: Flow, granularity: PatternGranularity = "structure+shapes") -> None:
        self.place = {index: i for i, index in enumerate(flow.order)}
        self._flow = flow
        self._facts = _find_facts(flow, granularity == "structure+shapes")
        # most blocks of a model repeat
        self._solved: dict[tuple[object, ...], tuple[list[int], str, str]] = {}

    def make(self, indices: Iterable[int]) -> Pattern:
        """The pattern of nodes given by index. Equal digests mean isomorphic; isomorphic sets have equal digests.

        The second half does not hold for nodes that refinement cannot tell apart although they are not symmetric, nor
        for highly symmetric sets, where the number of tied nodes times the number of all nodes is above 50,000 (some
        220 interchangeable branches): their digest may depend on the order in which nodes are listed.
        """
        inside = set(indices)
        members = sorted(inside, key=self.place.__getitem__)
        facts = [self._facts[index] for index in members]
        made = {tensor for one in facts for tensor, _ in one.makes}
        outside = Counter(tensor for one in facts for _, _, tensor in one.ends if tensor not in made)
        # the vertices of a labelled graph: the outside tensors that several inputs share, then the nodes
        shared = [name for name, count in outside.items() if count > 1]
        source = {tensor: (vertex, 0) for vertex, tensor in enumerate(shared)}
        labels, edges = [""] * len(shared), [list[InEdge]() for _ in shared]
        for one in facts:
            row, inputs = [], [*one.constants]
            for slot, known, tensor in one.ends:
                if tensor in source:
                    vertex, output = source[tensor]
                    row.append((slot, vertex, output))
                    if vertex < len(shared):
                        labels[vertex] = f"outside {known}"
                else:
                    inputs.append(f"{slot}:{known}")
            source |= {tensor: (len(labels), output) for output, (tensor, _) in enumerate(one.makes)}
            signs = "".join("." if inside.issuperset(readers) else "o" for _, readers in one.makes)
            labels.append(f"{one.label}({','.join(sorted(inputs))})>{signs}")
            edges.append(row)
        key = tuple(labels), tuple(map(tuple, edges))
        if key not in self._solved:
            order, certificate = canonical_order(labels, edges)
            digest = hashlib.sha256(certificate.encode()).hexdigest()[:16]
            self._solved[key] = order, f"{VERSION}-{digest}", self._text(members)
        order, digest, text = self._solved[key]
        first = len(labels) - len(members)  # vertex of the first node
        return Pattern(
            digest=digest,
            text=text,
            order=tuple(self._flow.model.nodes[members[v - first]].name for v in order if v >= first),
            inputs=tuple(outside),
            outputs=tuple(t for one in facts for t, readers in one.makes if not inside.issuperset(readers)),
        )

    def _text(self, members: Sequence[int]) -> str:
        """The text without carried nodes, which would hide the operators that matter; counts of many operators."""
        carried, nodes = self._flow.carried, self._flow.model.nodes
        chosen = [i for i in members if i not in carried] or members
        op_types = [nodes[i].op_type for i in chosen]
        if len(chosen) > LONGEST:
            common = sorted(Counter(op_types).items(), key=lambda item: (-item[1], item[0]))
            shown = ", ".join(f"{count} {op}" for op, count in common[:5])
            return f"{len(op_types)} nodes: {shown}" + (", ..." if len(common) > 5 else "")
        local = {index: number for number, index in enumerate(chosen, start=1)}
        feeds = [[local[p] for p in self._flow.producers[i] if p in local] for i in chosen]
        return _write_chains(op_types, feeds)


def _write_chains(op_types: Sequence[str], feeds: Sequence[Sequence[int]]) -> str:
    """The operators as text: ``Conv > Relu > (Conv | Conv > Relu) > Add``.

    They are in topological order; ``feeds`` lists the producers of each, by their number from 1.
    """
    chains, last = chains_of(feeds), len(feeds) + 1

    def write(vertex: int) -> str:
        parts = []
        while vertex >= 0:
            if 0 < vertex < last:
                parts.append(op_types[vertex - 1])
            after = chains.following[vertex]
            if branches := chains.inside.get(vertex):
                texts = sorted(map(write, branches))  # so that equal patterns have equal texts
                texts += ["skip"] if vertex > 0 and after in chains.successors[vertex] else []
                parts.append(f"({' | '.join(texts)})" if len(texts) > 1 or vertex == 0 else texts[0])
            vertex = after
        return " > ".join(parts)

    is_one_fork = chains.following[0] == last
    return write(0).removeprefix("(").removesuffix(")") if is_one_fork else write(0)


UNKNOWN = "?"  # an unknown type
_ABSENT = "-"  # the type of an omitted input
_GROUPS = re.compile(rb"(?<=[\[,])group=\d+")
_BODY_SLOT = -1  # the tensors that a body reads have no order
_RESULT = -1  # the reader of a graph output


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node in the terms of patterns.

    ``label`` has its operator, attributes and types of outputs; ``constants`` the types of constant inputs. ``ends``
    are slot, type and tensor of the other inputs; ``makes`` the outputs, each with the nodes that read it.
    """

    label: str
    constants: tuple[str, ...]
    ends: tuple[tuple[int, str, str], ...]
    makes: tuple[tuple[str, Sequence[int]], ...]


def _find_facts(flow: Flow, with_shapes: bool) -> dict[int, NodeFacts]:
    model = flow.model
    texts: dict[TensorType, str] = {}
    for known in set(model.types.values()):
        dims = "x".join("?" if dim is None else str(dim) for dim in known.shape or ())
        name = onnx.TensorProto.DataType.Name(known.elem_type)
        texts[known] = f"{name}[{dims}]" if with_shapes and known.shape is not None else name
    types = {tensor: texts[known] for tensor, known in model.types.items()} | {"": _ABSENT}
    readers = dict(flow.readers)
    for tensor in model.outputs:
        readers[tensor] = (*readers.get(tensor, ()), _RESULT)
    for tensor, owner in flow.given_by.items():
        readers[tensor] = (*readers.get(tensor, ()), owner)
    found: dict[int, NodeFacts] = {}
    for index in flow.order:
        node = model.nodes[index]
        own, data = flow.own[index], set(flow.reads[index])
        groups = attribute_of(node.proto, "group", 1)
        if not with_shapes and groups > 1 and node.op_type in ("Conv", "ConvTranspose"):
            # the number of groups of a depthwise convolution is a shape: it has one per channel
            weight = model.shape(node.input_at(1)) or ()
            axis, width = (0, groups) if node.op_type == "ConvTranspose" else (1, 1)
            if len(weight) > axis and weight[axis] == width:
                own = _GROUPS.sub(b"group=each", own)
        is_loose = node.op_type in COMMUTATIVE and is_commutative(node, model.opset)
        slots = [(0 if is_loose else slot, tensor) for slot, tensor in enumerate(node.inputs)]
        if index in flow.bodied:
            slots += [(_BODY_SLOT, tensor) for tensor in flow.reads[index] if tensor not in node.inputs]
        typed = [(slot, types.get(tensor, UNKNOWN), tensor) for slot, tensor in slots]
        found[index] = NodeFacts(
            label=own.decode() + ",".join(types.get(tensor, UNKNOWN) for tensor in node.outputs),
            constants=tuple(
                f"c{slot}:{known}" for slot, known, t in typed if t not in data and known != _ABSENT
            ),
            ends=tuple(end for end in typed if end[2] in data),
            makes=tuple((tensor, readers.get(tensor, ())) for tensor in node.outputs),
        )
    return found


Colors: TypeAlias = list[bytes]

# an input: its slot, the vertex that produces it, the index of the output
InEdge: TypeAlias = tuple[int, int, int]
# by vertex: label of the edge, and the vertex at its other end
Tagged: TypeAlias = list[list[tuple[bytes, int]]]


def canonical_order(
    labels: Sequence[str], edges: Sequence[Sequence[InEdge]], *, effort: int = 50_000
) -> tuple[list[int], str]:
    """Vertices of a labelled acyclic graph in canonical order, and the certificate: the whole graph in that order.

    Vertices are listed in topological order, each with its label and the edges into it. Graphs with equal certificates
    are isomorphic. If ties times vertices exceed the ``effort``, tied vertices are ordered as they are listed, all at
    once.
    """
    up: Tagged = [[(b"%d.%d." % (slot, output), end) for slot, end, output in row] for row in edges]
    down: Tagged = [[] for _ in labels]
    depth: list[int] = []
    for vertex, row in enumerate(up):
        depth.append(max((depth[feeding] + 1 for _, feeding in row), default=0))
        for tag, feeding in row:
            down[feeding].append((tag, vertex))
    hashes = {label: short_hash(label.encode()) for label in set(labels)}
    colors = _refine(up, down, [hashes[label] for label in labels])
    ties = len(colors) - len(set(colors))
    at_once = None if ties * len(colors) > effort else 1
    while True:
        classes: dict[bytes, list[int]] = {}
        for vertex, color in enumerate(colors):
            classes.setdefault(color, []).append(vertex)
        tied = [(len(members), color) for color, members in classes.items() if len(members) > 1]
        if not tied:
            break
        for number, vertex in enumerate(classes[min(tied)[1]][:at_once], start=1):
            colors[vertex] = short_hash(colors[vertex] + b"\0chosen" * number)
        colors = _refine(up, down, colors)
    order = sorted(range(len(colors)), key=lambda v: (depth[v], colors[v]))
    place = {vertex: i for i, vertex in enumerate(order)}
    rows = []
    for vertex in order:
        feeds = sorted([(slot, place[feeding], output) for slot, feeding, output in edges[vertex]])
        rows.append(f"{labels[vertex]}<{feeds}")
    return order, "\n".join(rows)


def _refine(up: Tagged, down: Tagged, colors: Colors) -> Colors:
    """Refine colours by the producers and the consumers of each vertex until the colouring is stable.

    Each sweep propagates a difference through the whole depth, down and up, so that few sweeps are needed
    however deep the graph is.
    """
    count = len(set(colors))
    while count < len(colors):
        before = count
        colors = _sweep(up, range(len(colors)), colors)
        if (count := len(set(colors))) == len(colors):
            break
        colors = _sweep(down, range(len(colors) - 1, -1, -1), colors)
        if (count := len(set(colors))) == before:
            break
    return colors


def _sweep(edges: Tagged, order: Iterable[int], colors: Colors) -> Colors:
    fresh = list(colors)
    for vertex in order:
        parts, row = colors[vertex], edges[vertex]
        if len(row) == 1:
            tag, end = row[0]
            parts += b"\0" + tag + fresh[end]
        elif row:
            parts = b"\0".join([parts, *sorted([tag + fresh[end] for tag, end in row])])
        fresh[vertex] = short_hash(parts)
    return fresh
