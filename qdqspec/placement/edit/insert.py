"""Inserts the Q/DQ pairs of a placement into a model; all other bytes stay unchanged.

The pairs are made with onnx-graphsurgeon (`placement.edit.pairs`). They are spliced into the model's bytes, because a
round trip of a whole model through graphsurgeon changes it. A candidate is a sequence of pieces of bytes that were made
once: the fields of the model's nodes, the names that consumers of pairs read instead, and the nodes of each pair.
Pieces have numbers, so that a candidate takes a few operations on columns of numbers. See
docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqspec.errors import PlacementError
from qdqspec.graph.dynamic_kernels import with_kernels
from qdqspec.graph.flat import closed, flat_form, scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS, opset_of, raise_opset
from qdqspec.graph.protos import (
    copied,
    is_external,
    map_tensors,
    names_read_inside,
    rename_tensors,
    tensors_in_nodes,
    with_value,
)
from qdqspec.graph.trt import DOMAIN, VERSION, is_pair_op
from qdqspec.graph.weights import WeightStore
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
    parts_of,
    serialized,
)  # fmt: skip
from qdqspec.placement.edit.biases import BIAS_INPUT, CorrectedBias
from qdqspec.placement.edit.pairs import Pair, PairMaker, QuantSource, makes_output
from qdqspec.quantize.formats import RUN_TIME
from qdqspec.types import Consumer, Placement, Site

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


__all__ = ["RAISED_FROM", "Inserted", "Inserter", "QuantSource", "insert_qdq"]

RAISED_FROM = "qdqspec.raised_from"  # model metadata: original opset and IR version


@dataclass(frozen=True)
class Inserted:
    """A model with Q/DQ pairs, and notes for the reader.

    ``parts`` is the model in the form to write; ``proto`` is the same as a message.
    """

    parts: Parts
    notes: tuple[str, ...] = ()

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model, parsed from its parts on first use."""
        return self.parts.proto()


def insert_qdq(
    model: Model,
    placement: Placement,
    numbers: QuantSource,
    *,
    floating: frozenset[Site] = frozenset(),
) -> Inserted:
    """The model with the pairs of a placement; `Inserter` makes many candidates of one model.

    Weights at the sites ``floating`` stay float. Raises `PlacementError` if a site does
    not fit, `ModelError` if the opset cannot be raised.
    """
    return Inserter(model, numbers, floating=floating).insert(placement)


class Inserter:
    """Makes candidates of one model; the common parts are prepared once.

    An activation gets a QuantizeLinear and a DequantizeLinear, and only the site's consumers read their
    output. If a graph output is one of them, the DequantizeLinear makes it under its name, and the float
    tensor is renamed; nodes that are not consumers read it under the new name. A weight is stored as integers
    behind a DequantizeLinear; at the sites ``floating``, and without dimensions, it stays float and gets both
    operators. With a ``store``, candidates refer to weights there, and are to be saved in its folder.
    """

    def __init__(
        self,
        model: Model,
        numbers: QuantSource,
        *,
        floating: frozenset[Site] = frozenset(),
        store: WeightStore | None = None,
    ) -> None:
        self._model = model
        self._maker = PairMaker(model, numbers, floating=floating, store=store)
        self._inserts: list[Insert] = []
        self._numbers: dict[str, int] = {}  # of the first insert, by key of the site
        self._counts: dict[int, int] = {}  # of the inserts of a site, by the number of the first
        self._special: set[int] = set()  # inserts that have an effect on the rest of the model
        self._bases: dict[int, _Base] = {}
        self._apart = store is None
        self._proto = model.proto if store is None else map_tensors(model.proto, store.externalize)
        self._flat = model.flat if store is None else flat_form(self._proto)

    def insert(self, placement: Placement) -> Inserted:
        """The model with these pairs. Raises `PlacementError` naming tensor and model."""
        sites = placement.ordered
        numbers = self._made([site.row for site in sites], sites, {})
        special = [self._inserts[number] for number in self._special.intersection(numbers)]
        made = [insert.site.tensor for insert in special if makes_output(insert.site)]
        names = {tensor: self._maker.float_name(tensor) for tensor in made}
        if names:  # then these sites read the float tensor under its new name
            keys = [site.row + "\n" if site.tensor in names else site.row for site in sites]
            numbers = self._made(keys, sites, names)
        base = self._base(max([self._model.opset, *(insert.opset for insert in special)]))
        foreign = any(insert.foreign for insert in special)
        placed = base.placed(numbers, self._inserts)
        candidate = base.template.filled(placed, base.renamed(names), foreign=foreign)
        if candidate is None or len(names) < len(made):
            raise self._overlap(sites)
        if any(insert.site.format == RUN_TIME for insert in special):
            candidate = parts_of(with_kernels(candidate.proto()))
        if self._model.has_bodies:  # integers go where the float weight is
            inserts = (self._inserts[number] for number in numbers)
            instead = {i.integer.name: i.site.tensor for i in inserts if i.integer is not None}
            candidate = parts_of(closed(candidate.proto(), instead))
        return Inserted(candidate, base.notes)

    def _made(self, keys: Sequence[str], sites: Sequence[Site], names: Mapping[str, str]) -> list[int]:
        """The pairs of the sites, each made once for a key. They read graph outputs under these ``names``."""
        found = [*map(self._numbers.get, keys, repeat(-1))]
        if -1 in found:
            for key, site in zip(keys, sites, strict=True):
                if key not in self._numbers:
                    first = len(self._inserts)
                    for part in self._parts(site):
                        self._make(part, site, names)
                    self._counts[first], self._numbers[key] = len(self._inserts) - first, first
            found = [self._numbers[key] for key in keys]
        if not self._model.has_bodies:
            return found
        return [part for first in found for part in range(first, first + self._counts[first])]

    def _make(self, site: Site, whole: Site, names: Mapping[str, str]) -> None:
        pair = self._maker.make(site, source=names.get(site.tensor, ""), whole=whole)
        replaces = self._maker.stores_integers(whole) and self._maker.is_private(site.tensor)
        covered = len(set(site.consumers)) if replaces else 0
        readers = len(self._model.consumers.get(site.tensor, ()))
        insert = Insert.of(site, pair, covered=covered, readers=readers)
        is_at_run_time = site.format == RUN_TIME
        if pair.opset > self._model.opset or insert.foreign or is_at_run_time or makes_output(site):
            self._special.add(len(self._inserts))
        self._inserts.append(insert)

    def _parts(self, site: Site) -> list[Site]:
        """A site split by the graphs that read it, as kernels are fused within a graph."""
        if not self._model.has_bodies:
            return [site]
        ends: dict[str, list[Consumer]] = {}
        for end in site.consumers:
            node = self._model.by_name.get(end.node)
            ends.setdefault(node.scope if node is not None else "", []).append(end)
        return [site if len(ends) == 1 else replace(site, consumers=tuple(some)) for some in ends.values()]

    def _overlap(self, sites: Iterable[Site]) -> PlacementError:
        seen: set[Consumer] = set()
        for site in sites:
            for end in site.consumers:
                if end in seen:
                    where = "a graph output" if end.is_output else f"input {end.input} of node '{end.node}'"
                    return PlacementError(
                        f"two sites of the placement feed {where} from tensor '{site.tensor}'",
                        where=self._model.where,
                        cure="name each consumer in one site only",
                    )
                seen.add(end)
        raise AssertionError("inserts that share an input come from sites that share a consumer")

    def _base(self, opset: int) -> _Base:
        if opset not in self._bases:
            self._bases[opset] = _Base(self._model, self._proto, self._flat, opset, apart=self._apart)
        return self._bases[opset]


def raised(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model at that opset, with the original opset in its metadata. `insert_qdq` does this when necessary."""
    higher = raise_opset(proto, opset)
    higher.metadata_props.add(key=RAISED_FROM, value=_version(proto))
    return higher


def _version(proto: onnx.ModelProto) -> str:
    return f"opset {opset_of(proto)}, IR version {proto.ir_version}"


class _Base:
    """The model at one opset, with the positions of inserts in it."""

    def __init__(
        self, model: Model, proto: onnx.ModelProto, flat: onnx.ModelProto, opset: int, *, apart: bool
    ) -> None:
        self.notes: tuple[str, ...] = ()
        if opset > model.opset or proto.ir_version < IR_WITH_FREE_INITIALIZERS:
            flat = flat_form(raised(proto, opset))
            was = _version(model.proto)
            self.notes = (f"raised to opset {opset}, which its number formats need (was {was})",)
        self._model = model
        self._nodes = flat.graph.node
        self._scopes = tuple(scopes_of(self._nodes)) if model.has_bodies else ()
        self._raised = RaisedInputs(model, self._nodes, is_raised=bool(self.notes))
        self.template = Template(flat, apart=apart)
        self._placed: dict[int, int] = {}  # numbers in the template
        self._renamed: dict[frozenset[str], Mapping[int, list[tuple[int, int]]]] = {}

    def placed(self, numbers: Sequence[int], inserts: Sequence[Insert]) -> list[int]:
        """The numbers of these inserts in the template."""
        placed = list(map(self._placed.get, numbers, repeat(-1)))
        if -1 in placed:
            self._placed |= {n: self._place(inserts[n]) for n in numbers if n not in self._placed}
            placed = list(map(self._placed.__getitem__, numbers))
        return placed

    def _place(self, insert: Insert) -> int:
        """The pair after the producer of the tensor, or before the first reader: in the graph of the readers."""
        site = insert.site
        cure = "choose a number format that needs no newer opset, or export the model with a newer one"
        places = [
            place
            for end in site.consumers
            if not end.is_output
            for place in self._raised.of(site.tensor, end, site.consumers, "quantized", cure)
        ]
        ends = list(dict.fromkeys(places))
        producer = self._raised.producer.get(site.tensor)
        is_captured = (
            producer is not None
            and self._scopes
            and any(self._scopes[index] != self._scopes[producer] for index, _ in ends)
        )
        if producer is None or site.tensor in self._model.constants or is_captured:
            return self.template.add(insert, ends, min(index for index, _ in ends))
        return self.template.add(insert, ends, producer + 1)

    def renamed(self, names: Mapping[str, str]) -> Mapping[int, list[tuple[int, int]]]:
        """The nodes that make or read graph outputs whose float tensors get these names."""
        key = frozenset(names)
        if key not in self._renamed:
            nodes = sorted({node for name in names for node in self._ends_of_outputs[name]})
            self._renamed[key] = {node: self.template.renamed(node, names) for node in nodes}
        return self._renamed[key]

    @cached_property
    def _ends_of_outputs(self) -> Mapping[str, list[int]]:
        """The nodes that make or read each graph output, in their bodies too."""
        found: dict[str, list[int]] = {name: [] for name in self._model.outputs}
        for index, node in enumerate(self._nodes):
            for name in {*node.input, *node.output, *names_read_inside(node)} & found.keys():
                found[name].append(index)
        return found


class RaisedInputs:
    """The consumers of a model after the opset was raised, which may replace and add nodes.

    ``producer`` gives the index of the node that makes a tensor.
    """

    def __init__(self, model: Model, nodes: Sequence[onnx.NodeProto], *, is_raised: bool) -> None:
        self._model = model
        self._nodes = nodes
        self._is_raised = is_raised
        self.producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}

    def of(
        self, tensor: str, end: Consumer, consumers: Iterable[Consumer], what: str, cure: str
    ) -> list[tuple[int, int]]:
        """The inputs (node, input) at which a consumer reads a tensor.

        If its node was replaced, they are those of the added nodes. The origin of these is unknown, so all possible
        origins must be among the ``consumers``; else `PlacementError` states ``what`` the tensor cannot be.
        """
        kept = self._unchanged_reader(tensor, end)
        if kept is not None:
            return [(kept, end.input)]
        found = self._added.get(tensor)
        if found and {*consumers}.issuperset(self.replaced(tensor)):
            return found
        raise PlacementError(
            f"tensor '{tensor}' cannot be {what}: raising the opset changed node '{end.node}'",
            where=self._model.where,
            cure=cure,
        )

    def replaced(self, tensor: str) -> tuple[Consumer, ...]:
        """The consumers of a tensor whose nodes were replaced."""
        nodes = (end for end in self._model.consumers.get(tensor, ()) if not end.is_output)
        return tuple(end for end in nodes if self._unchanged_reader(tensor, end) is None)

    def _unchanged_reader(self, tensor: str, end: Consumer) -> int | None:
        """The index of the consumer's node, if it reads the tensor there as before."""
        node = self._model.by_name[end.node]
        index = node.index
        if self._is_raised:
            index = next((self.producer[o] for o in node.outputs if o in self.producer), -1)
        reads = index >= 0 and self._nodes[index].input[end.input : end.input + 1] == [tensor]
        return index if reads else None

    @cached_property
    def _added(self) -> Mapping[str, list[tuple[int, int]]]:
        """The inputs of the nodes that raising the opset added, by tensor."""
        known = {(node.op_type, node.outputs[:1]) for node in self._model.nodes}
        found: dict[str, list[tuple[int, int]]] = {}
        for index, node in enumerate(self._nodes):
            if (node.op_type, tuple(node.output[:1])) not in known:
                for number, name in enumerate(node.input):
                    found.setdefault(name, []).append((index, number))
        return found
