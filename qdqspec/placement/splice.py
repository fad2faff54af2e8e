"""Splices Q/DQ pairs into a model's bytes.

A candidate is a sequence of pieces of bytes that were made once: the model's nodes unchanged and with inputs
from pairs, and the nodes of each pair (`placement.spots`). See
docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import TypeAlias

import numpy as np
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
    Piece,
    Run,
    around_graph,
    cut_node,
    fields_between,
    node_input,
    wire_field,
)  # fmt: skip
from qdqspec.placement.biases import BIAS_INPUT, CorrectedBias
from qdqspec.placement.pairs import Pair, makes_output
from qdqspec.placement.spots import Change, Insert, Numbers, Partial, Spots
from qdqspec.types import Site

Cut: TypeAlias = tuple[list[bytes], bytes]  # a node: its inputs, and the bytes after them

_IMPORT = wire_field(
    onnx.ModelProto.OPSET_IMPORT_FIELD_NUMBER, onnx.helper.make_opsetid(DOMAIN, VERSION).SerializeToString()
)
_INLINE = 4096  # bytes: smaller initializers are kept serialized, larger ones as messages


def insert_of(site: Site, pair: Pair, *, covered: int, readers: int) -> Insert:
    """A pair as bytes."""
    added = pair.bias is not None and pair.bias.is_added
    constants = (*pair.constants, *([pair.bias.value] if added and pair.bias is not None else []))
    return Insert(
        site=site,
        nodes=b"".join(wire_field(NODE, _bytes(node)) for node in pair.nodes),
        constants=b"".join(wire_field(INITIALIZER, _bytes(tensor)) for tensor in constants),
        integer=pair.integer,
        stored=b"" if pair.integer is None else _piece(pair.integer),
        output=pair.output,
        opset=pair.opset,
        covered=covered,
        readers=readers,
        makes_output=makes_output(site),
        foreign=any(is_pair_op(node) for node in pair.nodes),
        bias=pair.bias,
    )


class Template:
    """A model split into pieces: nodes, initializers and the bytes between them, in the order of the file."""

    def __init__(self, proto: onnx.ModelProto, *, apart: bool) -> None:
        """``apart`` keeps initializers with external data as messages, so that it can be included on saving."""
        self._before, self._after = around_graph(proto)
        known = any(opset.domain == DOMAIN for opset in proto.opset_import)
        self._after_foreign = self._after + (b"" if known else _IMPORT)  # with operators of domain ``trt``
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
        self._constants = {n.output[0]: i for i, n in enumerate(self._protos) if n.op_type == "Constant"}
        self._stock: list[Piece] = []  # the pieces in the order of the file, and those of inserts
        self._lengths = array("q")
        self._slots = len([self._kept(piece) for piece in pieces])
        self._spots = Spots()
        self._twice: dict[int, int] = {}  # nodes with two changed inputs, by these changes

    def _kept(self, piece: Piece) -> int:
        self._stock.append(piece)
        self._lengths.append(-1 if isinstance(piece, TensorProto) else len(piece))
        return len(self._stock) - 1

    def place(self, insert: Insert, ends: Sequence[tuple[int, int]], anchor: int) -> int:
        """The number of a new position: an insert before node ``anchor``, read by the ``ends``, (node, input)."""
        text = node_input(insert.output)
        is_new = insert.makes_output  # then its name is kept, and the float tensor is renamed
        changes = [
            self._reading(node, i, text) for node, i in ends if is_new or self._cuts[node][0][i] != text
        ]
        if insert.bias is not None:
            changes += self._with_bias(insert.bias, ends[0][0])
        stored = self._kept(insert.stored) if insert.stored else -1
        instead = tuple(self._instead(insert, stored)) if insert.stored else ()
        number = self._spots.add(
            anchor,
            nodes=self._kept(insert.nodes),
            constants=self._kept(insert.constants),
            foreign=insert.foreign,
            ends=[self._ends[node] + i for node, i in ends],
            changes=[*changes, *instead] if insert.covered == insert.readers else changes,
        )
        if insert.stored and insert.covered < insert.readers:
            self._spots.add_partial(number, Partial(insert, stored, instead))
        return number

    def _with_bias(self, bias: CorrectedBias, node: int) -> Iterator[Change]:
        """The change that gives a layer its corrected bias: another value of the constant, or one more input."""
        name = bias.value.name
        if bias.is_added:
            yield self._reading(node, BIAS_INPUT, node_input(name))
        elif name in self._initializers:
            yield Change(self._initializers[name], self._kept(_piece(bias.value)))
        else:
            constant = self._constants[name]
            changed = wire_field(NODE, _constant(self._protos[constant], bias.value))
            yield Change(constant, self._kept(changed))

    def _reading(self, node: int, i: int, text: bytes) -> Change:
        return Change(node, self._kept(_written(self._cuts[node], [(i, text)])), i, text)

    def renamed(self, node: int, names: Mapping[str, str]) -> Cut:
        """A node with other names for the tensors that it reads and makes."""
        changed = onnx.NodeProto()
        changed.CopyFrom(self._protos[node])
        rename_tensors(changed, lambda name: names.get(name, name))
        return cut_node(changed)

    def _instead(self, insert: Insert, stored: int) -> Iterator[Change]:
        """The changes that replace the float weight by stored integers."""
        weight = insert.site.tensor
        if weight in self._inputs:  # callers can no longer feed the float weight
            yield Change(self._inputs[weight], self._kept(b""))
        if weight in self._initializers:
            yield Change(self._initializers[weight], stored)
        elif weight in self._constants and insert.integer is not None:
            node = self._constants[weight]
            changed = wire_field(NODE, _constant(self._protos[node], insert.integer))
            yield Change(node, self._kept(changed))

    def filled(self, numbers: Sequence[int], renamed: Mapping[int, Cut]) -> Parts | None:
        """The model with the inserts of these positions; ``None`` if two of them are for one input.

        ``renamed`` nodes are replaced first.
        """
        spots = np.array(numbers, np.int64)
        if self._spots.overlap(spots):
            return None
        order = np.arange(self._slots)
        own = self._change(order, spots, renamed)
        instead, beside = self._spots.partial(numbers)
        for change in instead:
            order[change.slot] = change.piece
        anchors, nodes, constants = self._spots.added(spots)
        behind = np.full(len(beside) + len(constants), self._behind)
        added = np.concatenate([nodes, np.array(beside, np.int64), constants])
        order = np.insert(order, np.concatenate([anchors, behind]), added)
        after = self._after_foreign if self._spots.any_foreign(spots) else self._after
        return Parts(self._before, tuple(self._runs(order, own)), after, apart=self._apart)

    def _change(self, order: Numbers, spots: Numbers, renamed: Mapping[int, Cut]) -> list[bytes]:
        """Write the change of each of these positions into ``order``.

        Returns the pieces that only this candidate has: renamed nodes and those with many changes, numbered
        from -1 down.
        """
        slots, pieces, changes = self._spots.changes(spots)
        times = np.bincount(slots, minlength=len(order))
        times[list(renamed)] = len(order)
        times = times[slots]
        order[slots[times == 1]] = pieces[times == 1]
        order[slots[times == 2][::2]] = self._changed_twice(changes[times == 2])
        others: dict[int, list[int]] = {node: [] for node in renamed}
        for node, change in zip(slots[times > 2].tolist(), changes[times > 2].tolist(), strict=True):
            others.setdefault(node, []).append(change)
        order[list(others)] = -1 - np.arange(len(others))
        return [
            _written(renamed.get(node, self._cuts[node]), self._spots.texts(some))
            for node, some in others.items()
        ]

    def _changed_twice(self, changes: Numbers) -> list[int]:
        """Nodes with two changes each, one after the other."""
        pairs = (changes[::2] << 32 | changes[1::2]).tolist()
        made = list(map(self._twice.get, pairs, repeat(-1)))
        for at in [at for at, piece in enumerate(made) if piece < 0]:
            pair = changes[2 * at : 2 * at + 2].tolist()
            written = _written(self._cuts[self._spots.slot(pair[0])], self._spots.texts(pair))
            made[at] = self._twice[pairs[at]] = self._kept(written)
        return made

    def _runs(self, order: Numbers, own: Sequence[bytes]) -> Iterator[Piece | Run]:
        """Adjacent bytes joined; tensors, and the candidate's ``own`` pieces, separately."""
        lengths = np.asarray(self._lengths)[order]
        start = 0
        for at in np.flatnonzero((order < 0) | (lengths < 0)).tolist():
            yield Run(self._stock, order[start:at], int(lengths[start:at].sum()))
            yield self._stock[order[at]] if order[at] >= 0 else own[-1 - order[at]]
            start = at + 1
        yield Run(self._stock, order[start:], int(lengths[start:].sum()))


def _written(cut: Cut, texts: Iterable[tuple[int, bytes]] = ()) -> bytes:
    """A node with some of its inputs replaced."""
    inputs = cut[0].copy()
    for i, text in texts:
        inputs[i : i + 1] = [text]  # one more input, if it is the first missing one
    return wire_field(NODE, b"".join([*inputs, cut[1]]))


def _constant(node: onnx.NodeProto, value: TensorProto) -> bytes:
    """A ``Constant`` node with this value instead."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.output[0] = value.name
    next(a for a in changed.attribute if a.name == "value").t.CopyFrom(value)
    return _bytes(changed)


def _piece(tensor: TensorProto) -> Piece:
    small = tensor.ByteSize() < _INLINE
    return wire_field(INITIALIZER, _bytes(tensor)) if small else tensor


def _bytes(message: onnx.NodeProto | TensorProto | onnx.ValueInfoProto) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
