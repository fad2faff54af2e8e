"""Patterns: what regions have in common. May import floors 0 and 1.

Two regions share a pattern when their nodes can be paired so that operators, attributes, element types,
shapes (if asked for), input slots and the boundary agree. Where shapes are not asked for, the groups of a
convolution that has one for each channel are a shape too. Operands of commutative operators may change
places. Values of constants do not count, nor whether two inputs share one constant, and bodies of If,
Loop and Scan are told by their operators only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import onnx

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model, Node, TensorType
from qdqspec.graph.ops import COMMUTATIVE, is_commutative
from qdqspec.regions.coloring import Edge, Puzzle, canonical_order
from qdqspec.regions.flow import Flow, flow_of
from qdqspec.regions.text import LONGEST, counted_text, pattern_text
from qdqspec.registry import did_you_mean

Granularity: TypeAlias = Literal["structure", "structure+shapes"]
VERSION = "p1"
_End: TypeAlias = tuple[int, str, int, int, str]  # slot, tensor, maker (-1: fed), its output, text
REPEATING = 200  # nodes; nobody has larger blocks twice, and remembering them costs memory
UNKNOWN = "?"  # a type
_GROUPS = re.compile(r"(?<=[\[,])group=\d+")
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

    The second half is given up for sets that are full of symmetries, where nodes that nothing tells apart times all
    nodes are more than 50,000 (some 220 interchangeable branches): their digest may depend on the order in which
    nodes are listed.
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
    """Makes patterns of one model's node sets. What is known of single nodes is made once."""

    def __init__(self, flow: Flow, granularity: Granularity = "structure+shapes") -> None:
        self.place = {index: i for i, index in enumerate(flow.order)}
        self._flow = flow
        self._with_shapes = granularity == "structure+shapes"
        self._types = _type_texts(flow.model, with_shapes=self._with_shapes)
        self._faces: dict[int, _Face] = {}
        self._solved: dict[tuple[object, ...], tuple[list[int], str, str]] = {}
        self._made_by = {
            t: (i, k) for i in flow.order for k, t in enumerate(flow.model.nodes[i].outputs) if t
        }
        self._fed = frozenset(flow.model.inputs)
        self._results = frozenset(flow.model.outputs)

    def make(self, indices: Iterable[int]) -> Pattern:
        """The pattern of nodes given by index."""
        members = sorted(indices, key=self.place.__getitem__)
        labels, edges = self._puzzle(members)
        order, digest, text = self._solution(labels, edges, members)
        shared = len(labels) - len(members)
        names = (self._flow.model.nodes[members[v - shared]].name for v in order if v >= shared)
        return Pattern(digest=digest, text=text, order=tuple(names))

    def _solution(
        self, labels: list[str], edges: list[list[Edge]], members: Sequence[int]
    ) -> tuple[list[int], str, str]:
        """Order, digest and text. Blocks that repeat mostly read alike even before they are ordered."""
        key = (tuple(labels), tuple(map(tuple, edges))) if len(labels) <= REPEATING else ()
        if key and key in self._solved:
            return self._solved[key]
        order, certificate = canonical_order(Puzzle(labels, edges))
        digest = hashlib.sha256(certificate.encode()).hexdigest()[:16]
        solution = order, f"{VERSION}-{digest}", self._text(members)
        if key:
            self._solved[key] = solution
        return solution

    def _text(self, members: Sequence[int]) -> str:
        """Without what was only carried along, which would hide the operators that matter."""
        told = [i for i in members if i not in self._flow.carried] or members
        op_types = [self._flow.model.nodes[i].op_type for i in told]
        if len(told) > LONGEST:
            return counted_text(op_types)
        local = {index: i for i, index in enumerate(told)}
        feeds = [[local[p] for p in self._flow.producers[i] if p in local] for i in told]
        return pattern_text(op_types, feeds)

    def _puzzle(self, members: Sequence[int]) -> tuple[list[str], list[list[Edge]]]:
        """Vertices are first the outside tensors that several inputs share, then the nodes."""
        inside = set(members)
        faces = [self._face(index) for index in members]
        outside = _shared_outside(faces, inside)
        local = {index: i for i, index in enumerate(members, len(outside))}
        labels = [f"outside {self._types.get(tensor, UNKNOWN)}" for tensor in outside]
        edges: list[list[Edge]] = [[] for _ in outside]
        for face in faces:
            fed, feeds = [], []
            for slot, tensor, maker, output, text in face.ends:
                if maker in local:
                    feeds.append((slot, local[maker], output))
                elif tensor in outside:
                    feeds.append((slot, outside[tensor], 0))
                else:
                    fed.append(text)
            inputs = ",".join(sorted([*face.constants, *fed])) if fed else face.constant
            labels.append(f"{face.label}({inputs})>{self._seen(face.outputs, inside)}")
            edges.append(feeds)
        return labels, edges

    def _seen(self, outputs: Sequence[str], inside: set[int]) -> str:
        """Which outputs are seen outside, one sign each."""
        readers, results = self._flow.readers, self._results
        signs = ""
        for tensor in outputs:
            is_seen = tensor in results or not inside.issuperset(readers.get(tensor, ()))
            signs += "o" if is_seen else "."
        return signs

    def _face(self, index: int) -> _Face:
        if index not in self._faces:
            self._faces[index] = self._new_face(self._flow.model.nodes[index])
        return self._faces[index]

    def _new_face(self, node: Node) -> _Face:
        types, made_by = self._types, self._made_by
        loose = node.op_type in COMMUTATIVE and is_commutative(node, self._flow.model.opset)
        slots = [(0 if loose else slot, tensor) for slot, tensor in enumerate(node.inputs) if tensor]
        if node.index in self._flow.bodied:
            inner = self._flow.reads[node.index]
            slots += [(_BODY_SLOT, tensor) for tensor in inner if tensor not in node.inputs]
        ends, constants = [], []
        for slot, tensor in slots:
            text = f"{slot}:{types.get(tensor, UNKNOWN)}"
            made = made_by.get(tensor)
            if made is not None:
                ends.append((slot, tensor, made[0], made[1], text))
            elif tensor in self._fed:
                ends.append((slot, tensor, -1, 0, text))
            else:
                constants.append(f"c{text}")
        outputs = ",".join([types.get(t, UNKNOWN) for t in node.outputs])
        own = self._flow.own[node.index].decode()
        if not self._with_shapes and _is_depthwise(self._flow.model, node):
            own = _GROUPS.sub("group=each", own)
        constants.sort()
        return _Face(own + outputs, tuple(ends), tuple(constants), ",".join(constants), node.outputs)


class _Face(NamedTuple):
    """All that a pattern can see of a node by itself. ``ends`` are inputs that are not constant."""

    label: str
    ends: tuple[_End, ...]
    constants: tuple[str, ...]
    constant: str  # all of them
    outputs: tuple[str, ...]


def _is_depthwise(model: Model, node: Node) -> bool:
    """Whether a convolution has a group for each channel: how many is told by shapes, if these are asked for."""
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 2:
        return False
    weight = model.shape(node.inputs[1]) or ()
    groups = next((attribute.i for attribute in node.proto.attribute if attribute.name == "group"), 1)
    axis, width = (0, groups) if node.op_type == "ConvTranspose" else (1, 1)
    return groups > 1 and len(weight) > axis and weight[axis] == width


def _shared_outside(faces: Sequence[_Face], inside: set[int]) -> dict[str, int]:
    seen: set[str] = set()
    shared: dict[str, int] = {}
    for face in faces:
        for _, tensor, maker, _, _ in face.ends:
            if maker not in inside:
                if tensor in seen:
                    shared.setdefault(tensor, len(shared))
                seen.add(tensor)
    return shared


def _type_texts(model: Model, *, with_shapes: bool) -> dict[str, str]:
    """Tensor types as text, by tensor name; unknown ones are missing."""
    known = model.types
    # Tensors share types, and telling one by its identity is all that speed asks for.
    made = {id(one): one for one in known.values()}
    texts = {number: _type_text(one, with_shapes) for number, one in made.items()}
    return {tensor: texts[id(one)] for tensor, one in known.items()} | {"": "-"}


def _type_text(known: TensorType, with_shapes: bool) -> str:
    name: str = onnx.TensorProto.DataType.Name(known.elem_type)
    if not with_shapes or known.shape is None:
        return name
    return f"{name}[{'x'.join('?' if d is None else str(d) for d in known.shape)}]"
