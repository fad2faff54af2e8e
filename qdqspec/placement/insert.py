"""Inserts the Q/DQ pairs of a placement into a model; all other bytes stay unchanged.

The pairs are made with onnx-graphsurgeon (`placement.pairs`). They are spliced into the model's bytes
(`placement.splice`), because a round trip of a whole model through graphsurgeon changes it: see
docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import onnx

from qdqspec.errors import PlacementError
from qdqspec.graph.dynamic_kernels import with_kernels
from qdqspec.graph.flat import closed, flat_form, scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS, opset_of, raise_opset
from qdqspec.graph.protos import map_tensors, names_read_inside
from qdqspec.graph.weights import WeightStore
from qdqspec.graph.wire import Parts, parts_of
from qdqspec.placement.pairs import PairMaker, QuantSource, makes_output
from qdqspec.placement.splice import Insert, Template
from qdqspec.quantize.formats import RUN_TIME
from qdqspec.types import Consumer, Placement, Site

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
    behind a DequantizeLinear; at the sites ``floating`` it stays float and gets both operators. With a ``store``,
    candidates refer to weights there, and are to be saved in its folder.
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
        if producer is None or site.tensor in self._model.constants or self._is_captured(producer, ends):
            return self.template.add(insert, ends, min(index for index, _ in ends))
        return self.template.add(insert, ends, producer + 1)

    def _is_captured(self, producer: int, ends: Sequence[tuple[int, int]]) -> bool:
        return bool(self._scopes) and any(self._scopes[i] != self._scopes[producer] for i, _ in ends)

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
        others = set(self._model.consumers[tensor]) - {*consumers}
        found = self._added.get(tensor)
        if found and not any(self._unchanged_reader(tensor, o) is None for o in others if not o.is_output):
            return found
        raise PlacementError(
            f"tensor '{tensor}' cannot be {what}: raising the opset changed node '{end.node}'",
            where=self._model.where,
            cure=cure,
        )

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
