"""A model's bytes with room for Q/DQ pairs. May import floors 0 to 2 and onnx.

Making a candidate copies bytes that were made once: those of the model's nodes, cut where a consumer may read a
pair instead, and those of each pair. See docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, groupby
from operator import attrgetter, ne
from typing import TypeAlias

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
    around_graph,
    cut_node,
    fields_between,
    head,
    node_input,
    wire_field,
)  # fmt: skip
from qdqspec.placement.pairs import Pair, makes_output
from qdqspec.types import Site

# A place in a template, the text that it then has, its node, and by how much the node grows.
Text: TypeAlias = tuple[int, bytes, int, int]

_IMPORT = wire_field(
    onnx.ModelProto.OPSET_IMPORT_FIELD_NUMBER, onnx.helper.make_opsetid(DOMAIN, VERSION).SerializeToString()
)
_AT_ONCE = 4096  # pieces joined: for each, `bytes.join` asks for 80 bytes more, which for all are new pages every time
_INLINE = 4096  # bytes: smaller initializers are kept as they are written, larger ones as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """What a site adds to a model. ``nodes`` and ``constants`` are fields of the graph, ``number`` tells it apart.

    ``integer`` is the stored weight where there is one. It can stand in the place of the float weight once the
    inserts chosen cover all its ``readers``; this one covers ``covered`` of them.
    """

    number: int
    site: Site
    nodes: bytes
    constants: bytes
    integer: TensorProto | None
    stored: Piece  # the integers as an initializer
    output: str
    opset: int
    covered: int
    readers: int
    makes_output: bool  # of the graph
    foreign: bool  # whether operators of TensorRT's domain are among the nodes


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the nodes of an insert go in a template, and what the inputs say that then read its output."""

    insert: Insert
    anchor: int
    texts: tuple[Text, ...]


def insert_of(site: Site, pair: Pair, *, number: int, covered: int, readers: int) -> Insert:
    """A pair as bytes."""
    return Insert(
        number=number,
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
    """A model cut open. Each node is a gap, its head, its inputs one by one, and its rest; the last gap is behind."""

    def __init__(self, proto: onnx.ModelProto, *, apart: bool) -> None:
        """``apart`` keeps initializers with external data as they are, so that it can be taken in on saving."""
        self._before, self._after = around_graph(proto)
        known = any(opset.domain == DOMAIN for opset in proto.opset_import)
        self._after_foreign = self._after + (b"" if known else _IMPORT)  # with TensorRT's operators
        self._protos = proto.graph.node
        self._nodes: list[bytes] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []
        for node in proto.graph.node:
            inputs, rest = cut_node(node)
            self._starts.append(len(self._nodes))
            self._sizes.append(sum(map(len, inputs)) + len(rest))
            self._nodes += [b"", head(NODE, self._sizes[-1]), *inputs, rest]
        self._starts.append(len(self._nodes))
        self._nodes += [b"", fields_between(proto.graph, NODE + 1, INITIALIZER - 1)]
        self._apart = apart and not any(map(is_external, tensors_in_nodes(proto.graph.node)))
        self._rest: list[Piece] = [
            tensor if apart and is_external(tensor) else _piece(tensor) for tensor in proto.graph.initializer
        ]
        self._initializers = {t.name: i for i, t in enumerate(proto.graph.initializer)}
        self._gap = len(self._rest)
        self._rest += [b"", fields_between(proto.graph, INITIALIZER + 1, INPUT - 1)]
        self._inputs = {t.name: len(self._rest) + i for i, t in enumerate(proto.graph.input)}
        self._rest += [wire_field(INPUT, _bytes(value)) for value in proto.graph.input]
        self._rest.append(fields_between(proto.graph, INPUT + 1, LAST))
        self._constants = {n.output[0]: i for i, n in enumerate(self._protos) if n.op_type == "Constant"}

    def spot(self, insert: Insert, ends: Iterable[tuple[int, int]], anchor: int, *, after: bool) -> Spot:
        """Where an insert goes: before or after node ``anchor``; ``ends`` are (node, input)."""
        gap = self._starts[anchor + after]
        text = node_input(insert.output)
        texts = [self._text(self._starts[node] + 2 + position, text, node) for node, position in ends]
        return Spot(insert, gap, tuple(texts))

    def renamed(self, node: int, names: Mapping[str, str]) -> tuple[Text, ...]:
        """What changes in a node where the tensors that it reads and makes have other names."""
        changed = onnx.NodeProto()
        changed.CopyFrom(self._protos[node])
        rename_tensors(changed, lambda name: names.get(name, name))
        inputs, rest = cut_node(changed)
        texts = enumerate([*inputs, rest], self._starts[node] + 2)
        return tuple(self._text(slot, text, node) for slot, text in texts if text != self._nodes[slot])

    def _text(self, slot: int, text: bytes, node: int) -> Text:
        return slot, text, node, len(text) - len(self._nodes[slot])

    def filled(self, spots: Sequence[Spot], renamed: Iterable[Text] = ()) -> Parts | None:
        """The model with the inserts of these spots; ``None`` where two of them are for one input.

        What is ``renamed`` holds for all places that no insert is for.
        """
        nodes, sizes = self._nodes.copy(), self._sizes.copy()
        taken = bytearray(len(nodes))
        texts = list(chain.from_iterable([spot.texts for spot in spots]))
        for slot, text, node, growth in texts:
            taken[slot] = True
            nodes[slot] = text
            sizes[node] += growth
        if taken.count(True) < len(texts):
            return None
        for slot, text, node, growth in renamed:
            if not taken[slot]:
                nodes[slot] = text
                sizes[node] += growth
        for node in compress(count(), map(ne, sizes, self._sizes)):
            nodes[self._starts[node] + 1] = head(NODE, sizes[node])
        weights, constants, after = [], [], self._after
        for spot in spots:
            insert = spot.insert
            nodes[spot.anchor] += insert.nodes
            constants.append(insert.constants)
            if insert.foreign:
                after = self._after_foreign
            if insert.stored:
                weights.append(spot)
        rest = self._following(nodes, weights, constants)
        return Parts(self._before, (*_joined(nodes), *_runs_joined(rest)), after, apart=self._apart)

    def _following(self, nodes: list[bytes], weights: list[Spot], constants: list[bytes]) -> list[Piece]:
        """What follows the nodes: integer weights in the place of float ones, or beside them, and constants.

        Of the inserts of a weight the first in the graph takes its place: stripping meets that one first.
        """
        rest, beside = self._rest.copy(), []
        covered: dict[str, int] = {}
        for spot in weights:
            insert = spot.insert
            covered[insert.site.tensor] = covered.get(insert.site.tensor, 0) + insert.covered
        for insert in [spot.insert for spot in sorted(weights, key=attrgetter("anchor"))]:
            if covered.pop(insert.site.tensor, 0) == insert.readers:
                self._replace(nodes, rest, insert)
            else:
                beside.append(insert.stored)
        rest[self._gap : self._gap + 1] = [*beside, *_joined(constants)]
        return rest

    def _replace(self, nodes: list[bytes], rest: list[Piece], insert: Insert) -> None:
        weight = insert.site.tensor
        if weight in self._inputs:  # whoever could feed the float weight cannot any more
            rest[self._inputs[weight]] = b""
        if weight in self._initializers:
            rest[self._initializers[weight]] = insert.stored
        elif weight in self._constants and insert.integer is not None:
            at = self._starts[self._constants[weight]]
            changed = _constant(self._protos[self._constants[weight]], insert.integer)
            nodes[at + 1 : at + 3] = [head(NODE, len(changed)), changed]


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


def _runs_joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbouring bytes joined, and tensors between them."""
    for kind, run in groupby(pieces, type):
        some = list(run)
        yield from _joined(some) if kind is bytes else some


def _joined(run: Sequence[bytes]) -> Iterator[bytes]:
    """The same in fewer pieces."""
    return (b"".join(run[i : i + _AT_ONCE]) for i in range(0, len(run), _AT_ONCE))


def _bytes(message: onnx.NodeProto | TensorProto | onnx.ValueInfoProto) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
