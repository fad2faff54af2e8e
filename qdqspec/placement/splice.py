"""Splices Q/DQ pairs into a model's bytes.

A candidate is a sequence of pieces of bytes that were made once: the fields of the model's nodes, the names that
consumers of pairs read instead, and the nodes of each pair. Pieces have numbers, so that a candidate takes a few
operations on columns of numbers. See docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqspec.graph.protos import copied, is_external, rename_tensors, tensors_in_nodes
from qdqspec.graph.trt import DOMAIN, VERSION, is_pair_op
from qdqspec.graph.wire import (
    INITIALIZER,
    INPUT,
    LAST,
    NODE,
    Parts,
    Piece,
    PieceRun,
    around_graph,
    fields_between,
    head,
    node_fields,
    node_input,
    serialized,
)  # fmt: skip
from qdqspec.placement.biases import BIAS_INPUT, CorrectedBias, with_value
from qdqspec.placement.pairs import Pair
from qdqspec.types import Site

Integers: TypeAlias = npt.NDArray[np.int64]

_IMPORT = serialized(onnx.ModelProto.OPSET_IMPORT_FIELD_NUMBER, onnx.helper.make_opsetid(DOMAIN, VERSION))
_INLINE = 4096  # bytes: smaller initializers are kept serialized, larger ones as messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """The additions of a site to a model. ``nodes`` and ``constants`` are fields of the graph.

    ``integer`` is the stored weight if there is one. It can replace the float weight if the chosen inserts
    cover all its ``readers``; this one covers ``covered`` of them.
    """

    site: Site
    nodes: bytes
    constants: bytes
    integer: TensorProto | None
    output: str
    opset: int
    covered: int
    readers: int
    foreign: bool  # whether operators of domain ``trt`` are among the nodes
    bias: CorrectedBias | None

    @classmethod
    def of(cls, site: Site, pair: Pair, *, covered: int, readers: int) -> Insert:
        """A pair as bytes."""
        added = [pair.bias.value] if pair.bias is not None and pair.bias.is_added else []
        return cls(
            site=site,
            nodes=b"".join(serialized(NODE, node) for node in pair.nodes),
            constants=b"".join(serialized(INITIALIZER, tensor) for tensor in (*pair.constants, *added)),
            integer=pair.integer,
            output=pair.output,
            opset=pair.opset,
            covered=covered,
            readers=readers,
            foreign=any(map(is_pair_op, pair.nodes)),
            bias=pair.bias,
        )


class Template:
    """A model split into pieces, in the order of the file: fields of nodes, initializers, and the bytes between them.

    The place of a piece in the model is a slot, with the same number as the piece. Each change by a pair is another
    piece for a slot; the header of a node depends on the size of all of its pieces.
    """

    def __init__(self, proto: onnx.ModelProto, *, apart: bool) -> None:
        """``apart`` keeps initializers with external data as messages, so that it can be included on saving."""
        self._before, self._after = around_graph(proto)
        known = any(opset.domain == DOMAIN for opset in proto.opset_import)
        self._after_foreign = self._after + (b"" if known else _IMPORT)  # with operators of domain ``trt``
        self._protos = proto.graph.node
        self._pieces: list[Piece] = []  # in the order of the file, then those of changes
        self._lengths = array("q")  # -1 for a message
        self._nodes = array("q", (self._keep(node_fields(node)) for node in self._protos))  # the first slots
        self._nodes.append(self._keep([fields_between(proto.graph, NODE + 1, INITIALIZER - 1)]))
        self._sizes = array("q", (*(node.ByteSize() for node in self._protos), 0))
        self._apart = apart and not any(map(is_external, tensors_in_nodes(self._protos)))
        initializers = [t if apart and is_external(t) else _piece(t) for t in proto.graph.initializer]
        self._initializers = {
            t.name: i for i, t in enumerate(proto.graph.initializer, self._keep(initializers))
        }
        self._behind = self._keep([fields_between(proto.graph, INITIALIZER + 1, INPUT - 1)])
        inputs = [serialized(INPUT, value) for value in proto.graph.input]
        self._inputs = {t.name: i for i, t in enumerate(proto.graph.input, self._keep(inputs))}
        self._slots = self._keep([fields_between(proto.graph, INPUT + 1, LAST)]) + 1
        self._constants = {n.output[0]: i for i, n in enumerate(self._protos) if n.op_type == "Constant"}
        self._heads: dict[int, int] = {}  # headers of nodes by their size
        # Of each pair: the slot that its nodes are before, and the pieces of its nodes and constants.
        self._added = array("q")
        # Of each change: the number of the pair, the slot, the piece, and the node (the number of nodes for none).
        self._changes = array("q")
        # Pairs whose stored weight replaces the float one only together with others: the stored weight and changes.
        self._partial: dict[int, tuple[Insert, int, list[tuple[int, int]]]] = {}

    def _keep(self, pieces: Sequence[Piece]) -> int:
        """The number of the first of these new pieces."""
        self._pieces += pieces
        self._lengths.extend(-1 if isinstance(piece, TensorProto) else len(piece) for piece in pieces)
        return len(self._pieces) - len(pieces)

    def add(self, insert: Insert, ends: Sequence[tuple[int, int]], anchor: int) -> int:
        """The number of a new insert, which is before node ``anchor`` and read by the ``ends``, (node, input)."""
        number = len(self._added) // 3
        nodes = self._keep([insert.nodes, insert.constants])
        self._added.extend((self._nodes[anchor], nodes, nodes + 1))
        text = self._keep([node_input(insert.output)])
        for node, i in ends:
            self._changes.extend((number, self._nodes[node] + 1 + i, text, node))
        changes = [] if insert.bias is None else self._with_bias(number, insert.bias, ends[0][0])
        if insert.integer is not None:
            stored = self._keep([_piece(insert.integer)])
            instead = self._instead(insert.site.tensor, insert.integer, stored)
            if insert.covered < insert.readers:
                self._partial[number] = insert, stored, instead
            else:
                changes += instead
        for slot, piece in changes:
            self._changes.extend((number, slot, piece, len(self._protos)))
        return number

    def _with_bias(self, number: int, bias: CorrectedBias, node: int) -> list[tuple[int, int]]:
        """The changes that give a layer its corrected bias: another value of the constant, or one more input."""
        name = bias.value.name
        if bias.is_added:
            text = self._keep([node_input(name)])
            self._changes.extend((number, self._nodes[node] + 1 + BIAS_INPUT, text, node))
            return []
        if name in self._initializers:
            return [(self._initializers[name], self._keep([_piece(bias.value)]))]
        return self._constant(name, bias.value)

    def _instead(self, weight: str, integer: TensorProto, stored: int) -> list[tuple[int, int]]:
        """The changes that replace the float weight by stored integers."""
        changes = []
        if weight in self._inputs:  # callers can no longer feed the float weight
            changes.append((self._inputs[weight], self._keep([b""])))
        if weight in self._initializers:
            changes.append((self._initializers[weight], stored))
        elif weight in self._constants:
            changes += self._constant(weight, integer)
        return changes

    def _constant(self, name: str, value: TensorProto) -> list[tuple[int, int]]:
        """The changes of the ``Constant`` node that makes a tensor, with this value instead."""
        node = self._constants[name]
        changed = with_value(self._protos[node], value)
        changed.output[0] = value.name
        return self._replaced(node, changed)

    def _replaced(self, node: int, changed: onnx.NodeProto) -> list[tuple[int, int]]:
        """All changes of a node, whose number of inputs stays."""
        fields = node_fields(changed)
        first = self._keep(fields)
        return [(self._nodes[node] + i, first + i) for i in range(len(fields))]

    def renamed(self, node: int, names: Mapping[str, str]) -> list[tuple[int, int]]:
        """The changes of a node that reads and makes tensors of other names."""
        changed = copied(self._protos[node])
        rename_tensors(changed, lambda name: names.get(name, name))
        return self._replaced(node, changed)

    def filled(
        self, numbers: Sequence[int], renamed: Mapping[int, list[tuple[int, int]]], *, foreign: bool
    ) -> Parts | None:
        """The model with these pairs; ``None`` if two of them are for one input. ``renamed`` nodes are replaced first.

        ``foreign`` is whether operators of domain ``trt`` are added.
        """
        chosen = np.zeros(len(self._added) // 3, np.bool_)
        chosen[numbers] = True
        changes = np.asarray(self._changes).reshape(-1, 4)
        _, slots, pieces, nodes = changes[chosen[changes[:, 0]]].T
        if len(slots) and np.bincount(slots).max() > 1:
            return None
        changed = np.zeros(len(self._sizes), np.bool_)
        changed[nodes] = True
        changed[list(renamed)] = True
        changed[-1] = False  # no node
        order = np.arange(self._slots)
        sizes = np.array(self._sizes)
        for node, instead in renamed.items():
            for slot, piece in instead:
                order[slot] = piece
            sizes[node] = sum(self._lengths[piece] for _, piece in instead[1:])
        np.add.at(sizes, nodes, self._length(pieces) - self._length(order[slots]))
        order[slots] = pieces
        order[np.array(self._nodes)[changed]] = self._headers(sizes[changed])
        beside = self._beside(self._partial.keys() & set(numbers), order)
        before, made, constants = np.asarray(self._added).reshape(-1, 3)[numbers].T
        behind = np.full(len(beside) + len(constants), self._behind)
        added = np.concatenate([made, np.array(beside, np.int64), constants])
        order = np.insert(order, np.concatenate([before, behind]), added)
        after = self._after_foreign if foreign else self._after
        return Parts(self._before, tuple(self._runs(order)), after, apart=self._apart)

    def _length(self, pieces: Integers) -> Integers:
        return np.asarray(self._lengths)[pieces]

    def _headers(self, sizes: Integers) -> Integers:
        """The pieces that are headers of nodes of these sizes."""
        known, kind = np.unique(sizes, return_inverse=True)
        for size in known.tolist():
            if size not in self._heads:
                self._heads[size] = self._keep([head(NODE, size)])
        return np.array([self._heads[size] for size in known.tolist()], np.int64)[kind]

    def _beside(self, partial: Iterable[int], order: Integers) -> list[int]:
        """Weights to store beside the float ones. Those that several pairs cover together are replaced in ``order``.

        Of the inserts of a weight the first in the graph takes its place, because stripping finds that one first.
        """
        in_order = sorted(partial, key=lambda number: self._added[3 * number])
        found = [self._partial[number] for number in in_order]
        covered = Counter[str]()
        for insert, _, _ in found:
            covered[insert.site.tensor] += insert.covered
        beside = []
        for insert, stored, instead in found:
            if covered.pop(insert.site.tensor, 0) == insert.readers:
                for slot, piece in instead:
                    order[slot] = piece
            else:
                beside.append(stored)
        return beside

    def _runs(self, order: Integers) -> Iterator[Piece | PieceRun]:
        """Adjacent bytes joined; tensors separately."""
        lengths = self._length(order)
        start = 0
        for at in np.flatnonzero(lengths < 0).tolist():
            yield PieceRun(self._pieces, order[start:at], int(lengths[start:at].sum()))
            yield self._pieces[order[at]]
            start = at + 1
        yield PieceRun(self._pieces, order[start:], int(lengths[start:].sum()))


def _piece(tensor: TensorProto) -> Piece:
    return serialized(INITIALIZER, tensor) if tensor.ByteSize() < _INLINE else tensor
