"""A model's bytes with room for Q/DQ pairs. May import floors 0 to 2, numpy and onnx.

Making a candidate puts pieces of bytes in order that were made once: the model's nodes as they are and as they read
pairs, and those of each pair (`placement.spots`). See docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqspec.graph.protos import is_external, rename_tensors, tensors_in_nodes
from qdqspec.graph.trt import DOMAIN, VERSION, is_pair_op
from qdqspec.graph.wire import (
    INITIALIZER,
    INPUT,
    LAST,
    NODE,
    Parts,
    Run,
    around_graph,
    cut_node,
    fields_between,
    node_input,
    wire_field,
)  # fmt: skip
from qdqspec.placement.pairs import Pair, makes_output
from qdqspec.placement.spots import Change, Insert, Numbers, Piece, Spots
from qdqspec.types import Site

Pieces: TypeAlias = npt.NDArray[np.object_]
Cut: TypeAlias = tuple[list[bytes], bytes]  # a node: its inputs, and all that follows them

_IMPORT = wire_field(
    onnx.ModelProto.OPSET_IMPORT_FIELD_NUMBER, onnx.helper.make_opsetid(DOMAIN, VERSION).SerializeToString()
)
_INLINE = 4096  # bytes: smaller initializers are kept as they are written, larger ones as they are


def insert_of(site: Site, pair: Pair, *, covered: int, readers: int) -> Insert:
    """A pair as bytes."""
    return Insert(
        site=site,
        nodes=b"".join(wire_field(NODE, _bytes(node)) for node in pair.nodes),
        constants=b"".join(wire_field(INITIALIZER, _bytes(tensor)) for tensor in pair.constants),
        integer=pair.integer,
        stored=b"" if pair.integer is None else _piece(pair.integer),
        output=pair.output,
        opset=pair.opset,
        covered=covered,
        readers=readers,
        makes_output=makes_output(site),
        foreign=any(is_pair_op(node) for node in pair.nodes),
    )


class Template:
    """A model cut open: nodes, initializers and what stands between them, in pieces in the order of the file."""

    def __init__(self, proto: onnx.ModelProto, *, apart: bool) -> None:
        """``apart`` keeps initializers with external data as they are, so that it can be taken in on saving."""
        self._before, self._after = around_graph(proto)
        known = any(opset.domain == DOMAIN for opset in proto.opset_import)
        self._after_foreign = self._after + (b"" if known else _IMPORT)  # with TensorRT's operators
        self._protos = proto.graph.node
        self._cuts = [cut_node(node) for node in proto.graph.node]
        self._ends = [0, *accumulate(len(inputs) for inputs, _ in self._cuts)]  # the first input of each node
        pieces: list[Piece] = [_written(cut) for cut in self._cuts]
        pieces.append(fields_between(proto.graph, NODE + 1, INITIALIZER - 1))
        self._apart = apart and not any(map(is_external, tensors_in_nodes(proto.graph.node)))
        self._initializers = {t.name: len(pieces) + i for i, t in enumerate(proto.graph.initializer)}
        pieces += [t if apart and is_external(t) else _piece(t) for t in proto.graph.initializer]
        self._behind = len(pieces)  # the initializers
        pieces.append(fields_between(proto.graph, INITIALIZER + 1, INPUT - 1))
        self._inputs = {t.name: len(pieces) + i for i, t in enumerate(proto.graph.input)}
        pieces += [wire_field(INPUT, _bytes(value)) for value in proto.graph.input]
        pieces.append(fields_between(proto.graph, INPUT + 1, LAST))
        self._pieces = _in_array(pieces)
        self._constants = {n.output[0]: i for i, n in enumerate(self._protos) if n.op_type == "Constant"}
        self._holds_tensors = any(isinstance(piece, TensorProto) for piece in pieces)
        self._spots = Spots()
        self._twice: dict[tuple[int, int], bytes] = {}  # nodes with two inputs changed, by these changes

    def place(self, insert: Insert, ends: Sequence[tuple[int, int]], anchor: int) -> int:
        """The number of a new spot: that of an insert before node ``anchor``, read by the ``ends``, (node, input)."""
        text = node_input(insert.output)
        is_new = insert.makes_output  # then its name stays, and it is the float tensor that gets another
        changes = [
            self._reading(node, i, text) for node, i in ends if is_new or self._cuts[node][0][i] != text
        ]
        instead = tuple(self._instead(insert)) if insert.stored else ()
        if insert.covered == insert.readers:
            changes += instead
        self._holds_tensors |= isinstance(insert.stored, TensorProto)
        return self._spots.add(insert, anchor, [self._ends[node] + i for node, i in ends], changes, instead)

    def _reading(self, node: int, i: int, text: bytes) -> Change:
        return Change(node, _written(self._cuts[node], [(i, text)]), i, text)

    def renamed(self, node: int, names: Mapping[str, str]) -> Cut:
        """A node where the tensors that it reads and makes have other names."""
        changed = onnx.NodeProto()
        changed.CopyFrom(self._protos[node])
        rename_tensors(changed, lambda name: names.get(name, name))
        return cut_node(changed)

    def _instead(self, insert: Insert) -> Iterator[Change]:
        """What puts stored integers in the place of the float weight."""
        weight = insert.site.tensor
        if weight in self._inputs:  # whoever could feed the float weight cannot any more
            yield Change(self._inputs[weight], b"")
        if weight in self._initializers:
            yield Change(self._initializers[weight], insert.stored)
        elif weight in self._constants and insert.integer is not None:
            node = self._constants[weight]
            yield Change(node, wire_field(NODE, _constant(self._protos[node], insert.integer)))

    def filled(self, numbers: Sequence[int], renamed: Mapping[int, Cut]) -> Parts | None:
        """The model with the inserts of these spots; ``None`` where two of them are for one input.

        ``renamed`` nodes are others beforehand.
        """
        spots = np.array(numbers, np.int64)
        if self._spots.overlap(spots):
            return None
        pieces = self._pieces.copy()
        self._change(pieces, spots, renamed)
        instead, beside = self._spots.partial(numbers)
        for change in instead:
            pieces[change.slot] = change.piece
        anchors, nodes, constants = self._spots.added(numbers, spots)
        behind = np.full(len(beside) + len(constants), self._behind)
        pieces = np.insert(
            pieces, np.concatenate([anchors, behind]), _in_array([*nodes, *beside, *constants])
        )
        after = self._after_foreign if self._spots.any_foreign(spots) else self._after
        graph = tuple(_runs(pieces.tolist())) if self._holds_tensors else (pieces.tolist(),)
        return Parts(self._before, graph, after, apart=self._apart)

    def _change(self, pieces: Pieces, spots: Numbers, renamed: Mapping[int, Cut]) -> None:
        """Puts what each of these spots changes by itself into ``pieces``, and renamed nodes."""
        slots, changes = self._spots.changes(spots)
        times = np.bincount(slots, minlength=len(pieces))
        times[list(renamed)] = len(pieces)
        times = times[slots]
        pieces[slots[times == 1]] = self._spots.pieces(changes[times == 1])
        pieces[slots[times == 2][::2]] = self._changed_twice(changes[times == 2])
        others: dict[int, list[int]] = {node: [] for node in renamed}
        for node, change in zip(slots[times > 2].tolist(), changes[times > 2].tolist(), strict=True):
            others.setdefault(node, []).append(change)
        for node, some in others.items():
            pieces[node] = _written(renamed.get(node, self._cuts[node]), self._spots.texts(some))

    def _changed_twice(self, changes: Numbers) -> list[bytes]:
        """Nodes that two changes each are made of, the one after the other."""
        pairs = list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
        for pair in set(pairs) - self._twice.keys():
            slot, texts = self._spots.slot(pair[0]), self._spots.texts(pair)
            self._twice[pair] = _written(self._cuts[slot], texts)
        return list(map(self._twice.__getitem__, pairs))


def _written(cut: Cut, texts: Iterable[tuple[int, bytes]] = ()) -> bytes:
    """A node, other texts in the place of some of its inputs."""
    inputs = cut[0].copy()
    for i, text in texts:
        inputs[i] = text
    return wire_field(NODE, b"".join([*inputs, cut[1]]))


def _constant(node: onnx.NodeProto, value: TensorProto) -> bytes:
    """A ``Constant`` node that makes this value instead."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.output[0] = value.name
    next(a for a in changed.attribute if a.name == "value").t.CopyFrom(value)
    return _bytes(changed)


def _piece(tensor: TensorProto) -> Piece:
    small = tensor.ByteSize() < _INLINE
    return wire_field(INITIALIZER, _bytes(tensor)) if small else tensor


def _in_array(pieces: Sequence[Piece]) -> Pieces:
    held = np.empty(len(pieces), np.object_)
    held[:] = pieces
    return held


def _runs(pieces: Iterable[Piece]) -> Iterator[Run]:
    """Neighbouring bytes together, and each tensor by itself."""
    run: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, TensorProto):
            yield from (run, piece) if run else (piece,)
            run = []
        else:
            run.append(piece)
    yield run


def _bytes(message: onnx.NodeProto | TensorProto | onnx.ValueInfoProto) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
