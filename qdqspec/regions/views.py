"""The parts of nodes that a pattern compares, as small numbers.

Most blocks of a model repeat. The properties that nodes of a `NodeKind` share are written once, and a `NodeView`
holds the rest as small numbers, so that a repeated block is recognized before it is written or ordered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import onnx

from qdqspec.graph.model import Model, Node, TensorType
from qdqspec.graph.ops import COMMUTATIVE, is_commutative
from qdqspec.regions.flow import Flow

UNKNOWN = "?"  # an unknown type
_ABSENT = "-"  # the type of an omitted input
_GROUPS = re.compile(rb"(?<=[\[,])group=\d+")
_BODY_SLOT = -1  # the tensors that a body reads have no order
_RESULT = -1  # the reader of a graph output


@dataclass(frozen=True, slots=True, eq=False)
class NodeKind:
    """The properties of nodes without their neighbours; one object per kind, compared by identity.

    ``ends`` are slot and type of the inputs that are not constant.
    """

    label: str
    ends: tuple[tuple[int, str], ...]
    constants: tuple[str, ...]
    makes: int  # outputs

    def text(self, fed: Sequence[tuple[int, str]], seen: str) -> str:
        """The label of a node, given its ends fed by outside tensors and its outputs read outside."""
        inputs = sorted([*self.constants, *(f"{slot}:{known}" for slot, known in fed)])
        return f"{self.label}({','.join(inputs)})>{seen}"


class NodeView(NamedTuple):
    """Nodes in canonical order with their kinds, the source of each end, and which outputs are read outside.

    In ``feeds`` tensors made inside are numbered from 0, outside ones from -1 down, in order of appearance.
    ``inputs`` and ``outputs`` are the tensors that enter and leave, in that order.
    """

    members: list[int]
    kinds: list[NodeKind]
    feeds: list[int]
    seen: list[str]
    inputs: list[str]
    outputs: list[str]


# A node: its kind, the tensors its ends read, and the tensors it makes with the readers of each.
_Face: TypeAlias = tuple[NodeKind, Sequence[str], Sequence[tuple[str, Sequence[int]]]]


class Viewer:
    """Makes views of one model's node sets. Facts about single nodes are computed once."""

    def __init__(self, flow: Flow, *, with_shapes: bool) -> None:
        self.place = {index: i for i, index in enumerate(flow.order)}
        self._faces = dict(zip(flow.order, _faces(flow, with_shapes), strict=True))

    def view(self, indices: Iterable[int]) -> NodeView:
        """The view of nodes given by index."""
        inside = set(indices)
        members = sorted(inside, key=self.place.__getitem__)
        kinds: list[NodeKind] = []
        feeds: list[int] = []
        seen: list[str] = []
        inputs: list[str] = []
        outputs: list[str] = []
        number: dict[str, int] = {}  # in ``feeds``
        made = 0
        for index in members:
            kind, reads, makes = self._faces[index]
            kinds.append(kind)
            for tensor in reads:
                feed = number.get(tensor)
                if feed is None:
                    inputs.append(tensor)
                    feed = number[tensor] = -len(inputs)
                feeds.append(feed)
            signs = ""
            for tensor, readers in makes:
                number[tensor] = made
                made += 1
                if inside.issuperset(readers):
                    signs += "."
                else:
                    signs += "o"
                    outputs.append(tensor)
            seen.append(signs)
        return NodeView(members, kinds, feeds, seen, inputs, outputs)


def _faces(flow: Flow, with_shapes: bool) -> Iterator[_Face]:
    model, types = flow.model, _type_texts(flow.model, with_shapes)
    readers = dict(flow.readers)
    for tensor in model.outputs:
        readers[tensor] = (*readers.get(tensor, ()), _RESULT)
    for tensor, owner in flow.given_by.items():
        readers[tensor] = (*readers.get(tensor, ()), owner)
    kinds: dict[tuple[object, ...], NodeKind] = {}
    for index in flow.order:
        node = model.nodes[index]
        own, reads, slots = flow.own[index], flow.reads[index], node.inputs
        if index in flow.bodied:
            inner = tuple([t for t in reads if t not in slots])
            reads = (*[t for t in slots if t in reads], *inner)
            slots = (*slots, *inner)
        if not with_shapes and _is_depthwise(model, node):
            own = _GROUPS.sub(b"group=each", own)
        # Equal counts mean that each input carries data.
        flows = None if len(reads) == len(slots) else tuple([t in reads for t in slots])
        read = tuple([types.get(t, UNKNOWN) for t in slots])
        made = tuple([types.get(t, UNKNOWN) for t in node.outputs])
        key = own, len(node.inputs), read, flows, made
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _kind(node, model.opset, own, read, flows, made)
        yield kind, reads, [(t, readers.get(t, ())) for t in node.outputs]


def _kind(
    node: Node, opset: int, own: bytes, read: Sequence[str], flows: Sequence[bool] | None, made: Sequence[str]
) -> NodeKind:
    loose = node.op_type in COMMUTATIVE and is_commutative(node, opset)
    ends, constants = [], []
    for slot, known in enumerate(read):
        told = _BODY_SLOT if slot >= len(node.inputs) else 0 if loose else slot
        if flows is None or flows[slot]:
            ends.append((told, known))
        elif known != _ABSENT:
            constants.append(f"c{told}:{known}")
    return NodeKind(own.decode() + ",".join(made), tuple(ends), tuple(constants), len(made))


def _is_depthwise(model: Model, node: Node) -> bool:
    """Whether a convolution has one group per channel. Shapes, if asked for, give the number of groups."""
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 2:
        return False
    weight = model.shape(node.inputs[1]) or ()
    groups = next((attribute.i for attribute in node.proto.attribute if attribute.name == "group"), 1)
    axis, width = (0, groups) if node.op_type == "ConvTranspose" else (1, 1)
    return groups > 1 and len(weight) > axis and weight[axis] == width


def _type_texts(model: Model, with_shapes: bool) -> dict[str, str]:
    """Tensor types as text, by tensor name; unknown ones are missing."""
    known = model.types
    # Tensors share type objects: comparing by identity is faster.
    made = {id(one): one for one in known.values()}
    texts = {number: _type_text(one, with_shapes) for number, one in made.items()}
    return {tensor: texts[id(one)] for tensor, one in known.items()} | {"": _ABSENT}


def _type_text(known: TensorType, with_shapes: bool) -> str:
    name: str = onnx.TensorProto.DataType.Name(known.elem_type)
    if not with_shapes or known.shape is None:
        return name
    return f"{name}[{'x'.join('?' if d is None else str(d) for d in known.shape)}]"
