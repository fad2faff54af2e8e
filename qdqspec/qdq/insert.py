"""Inserts the Q/DQ pairs of a placement into a model; all other nodes, and their fields, stay unchanged.

The pairs are made with onnx-graphsurgeon (`qdqspec.qdq.pairs`), and added to the nodes of the model's protobuf,
because a round trip of a whole model through graphsurgeon changes it. See
docs/decisions/0002-insertion-into-the-own-protobuf.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TypeAlias

import onnx
from onnx import TensorProto

from qdqspec.errors import PlacementError
from qdqspec.graph import Model, WeightStore, raise_opset
from qdqspec.graph.protos import (
    IR_WITH_FREE_INITIALIZERS,
    copied,
    map_tensors,
    names_read_inside,
    opset_of,
    refill,
    rename_tensors,
    with_value,
)
from qdqspec.graph.trt import DOMAIN, VERSION, is_pair_op
from qdqspec.qdq.dynamic_kernels import with_kernels
from qdqspec.qdq.formats import RUN_TIME
from qdqspec.qdq.pairs import Pair, PairMaker, QuantSource, makes_output
from qdqspec.types import Consumer, Placement, Site

RAISED_FROM = "qdqspec.raised_from"  # model metadata: original opset and IR version
_Ends: TypeAlias = tuple[tuple[int, int], ...]  # inputs of nodes: (index of the node, number of the input)
_Insert: TypeAlias = tuple[Site, Pair]


@dataclass(frozen=True, slots=True)
class ChangedModel:
    """A model whose Q/DQ pairs were inserted or removed, and notes for the reader."""

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()


def insert_qdq(
    model: Model, placement: Placement, numbers: QuantSource, *, floating: frozenset[Site] = frozenset()
) -> ChangedModel:
    """The model with the pairs of a placement; `Inserter` makes many candidates of one model.

    Raises `PlacementError` if a site does not fit, `ModelError` if the opset cannot be raised.
    """
    return Inserter(model, numbers, floating=floating).insert(placement)


class Inserter:
    """Makes candidates of one model; the common parts are prepared once.

    An activation gets a QuantizeLinear and a DequantizeLinear, and only the site's consumers read their
    output. If a graph output is one of them, the DequantizeLinear makes it under its name, and the float
    tensor is renamed; nodes that are not consumers read it under the new name. A weight is stored as integers
    behind a DequantizeLinear; at the sites ``floating``, without dimensions, and before a Concat it stays
    float and gets both operators. With a ``store``, candidates refer to weights there, and are to be saved in
    its folder.
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
        self._made: dict[tuple[str, str], list[_Insert]] = {}  # by row of the site and its source
        opened = model if store is None else Model(map_tensors(model.proto, store.externalize))
        self._base = cache(lambda opset: _Base(OpenModel(model, opened, opset), self._maker))

    def insert(self, placement: Placement) -> ChangedModel:
        """The model with these pairs. Raises `PlacementError` naming tensor and model."""
        sites = placement.ordered
        seen: set[Consumer] = set()
        for site in sites:
            for end in seen.intersection(site.consumers):
                where = "a graph output" if end.is_output else f"input {end.input} of node '{end.node}'"
                raise PlacementError(
                    f"two sites of the placement feed {where} from tensor '{site.tensor}'",
                    where=self._model.where,
                    cure="name each consumer in one site only",
                )
            seen.update(site.consumers)
        floats = {site.tensor: self._maker.float_name(site.tensor) for site in sites if makes_output(site)}
        inserts = [one for site in sites for one in self._make(site, floats.get(site.tensor, ""))]
        base = self._base(max((self._model.opset, *(pair.opset for _, pair in inserts))))
        candidate = base.with_pairs(inserts, floats)
        if any(site.format == RUN_TIME for site in sites):
            candidate = with_kernels(candidate)
        # integers go where the float weight is
        instead = {pair.integer.name: site.tensor for site, pair in inserts if pair.integer is not None}
        return ChangedModel(self._model.close_bodies(candidate, instead), base.opened.notes)

    def _make(self, site: Site, source: str) -> list[_Insert]:
        """The pairs of a site, made once: one for each graph that reads it, as kernels are fused within a graph.

        ``source`` is the new name of a graph output.
        """
        if (site.row, source) not in self._made:
            parts: dict[str, list[Consumer]] = {}
            for end in site.consumers:
                node = self._model.by_name.get(end.node)
                parts.setdefault(node.scope if node is not None else "", []).append(end)
            split = [replace(site, consumers=tuple(ends)) for ends in parts.values()] or [site]
            make = partial(self._maker.make, source=source, whole=site)
            self._made[site.row, source] = [(part, make(part)) for part in split]
        return self._made[site.row, source]


class _Base:
    """The model at one opset, that candidates are made of."""

    def __init__(self, opened: OpenModel, maker: PairMaker) -> None:
        self.opened = opened
        self._model, self._maker = opened.model, maker
        weights, nodes = opened.flat.graph.initializer, opened.nodes
        self._weights = {tensor.name: i for i, tensor in enumerate(weights)}
        self._constants = {node.output[0]: i for i, node in enumerate(nodes) if node.op_type == "Constant"}
        self._place = cache(self._find_place)

    def with_pairs(self, inserts: Iterable[_Insert], floats: Mapping[str, str]) -> onnx.ModelProto:
        """The model with these pairs; ``floats`` are the new names of graph outputs before their pairs."""
        found = ((self._place(site), site, pair) for site, pair in inserts)
        placed = sorted(found, key=lambda one: one[0][0])
        proto = copied(self.opened.flat)
        graph, nodes = proto.graph, proto.graph.node
        for index in {index for name in floats for index in self._ends_of_outputs[name]}:
            rename_tensors(nodes[index], lambda name: floats.get(name, name))
        order = [(index, 1) for index in range(len(nodes))]
        for (index, ends), _, pair in placed:
            for reader, number in ends:
                nodes[reader].input[number] = pair.output
            graph.initializer.extend(pair.constants)
            if pair.bias is not None and pair.bias.is_added:
                nodes[ends[0][0]].input.append(pair.bias.value.name)
                graph.initializer.append(pair.bias.value)
            elif pair.bias is not None:
                self._replace_constant(graph, pair.bias.value.name, pair.bias.value)
            nodes.extend(pair.nodes)
            order += [(index, 0)] * len(pair.nodes)
        stored = [(site, pair.integer) for _, site, pair in placed if pair.integer is not None]
        self._store_weights(graph, stored)
        keys = iter(order)
        nodes.sort(key=lambda _: next(keys))  # the pairs of an index before the node
        if all(one.domain != DOMAIN for one in proto.opset_import) and any(
            is_pair_op(node) for _, _, pair in placed for node in pair.nodes
        ):
            proto.opset_import.add(domain=DOMAIN, version=VERSION)
        return proto

    def _store_weights(self, graph: onnx.GraphProto, stored: list[tuple[Site, TensorProto]]) -> None:
        """Store an integer weight in the place of the float weight, or beside a float weight that other nodes read.

        Of the pairs of a weight the first in the graph takes its place, because stripping finds that one first. Those
        of one site in several graphs have the same integers.
        """
        private = [site for site, _ in stored if self._maker.is_private(site.tensor)]
        covered = Counter(site.tensor for site in private for _ in {*site.consumers})
        replaced = set()
        first: dict[str, tuple[Site, TensorProto]] = {}
        for site, integer in stored:
            first.setdefault(integer.name, (site, integer))
        for site, integer in first.values():
            if covered.pop(site.tensor, 0) == len(self._model.consumers.get(site.tensor, ())):
                self._replace_constant(graph, site.tensor, integer)
                replaced.add(site.tensor)
            else:
                graph.initializer.append(integer)
        if replaced:  # callers can no longer feed the float weight
            refill(graph.input, [value for value in graph.input if value.name not in replaced])

    def _replace_constant(self, graph: onnx.GraphProto, name: str, value: TensorProto) -> None:
        """Store another value in the place of a constant."""
        if name in self._weights:
            graph.initializer[self._weights[name]].CopyFrom(value)
        else:
            node = graph.node[self._constants[name]]
            node.CopyFrom(with_value(node, value))
            node.output[0] = value.name

    def _find_place(self, site: Site) -> tuple[int, _Ends]:
        """The index of the node that a pair comes before, and the inputs that read it.

        It comes after the producer of the tensor, or before the first reader: in the graph of the readers.
        """
        cure = "choose a number format that needs no newer opset, or export the model with a newer one"
        places = [
            place
            for end in site.consumers
            if not end.is_output
            for place in self.opened.inputs.of(site.tensor, end, site.consumers, "quantized", cure)
        ]
        ends = tuple(dict.fromkeys(places))
        producer = self.opened.inputs.producer.get(site.tensor)
        if producer is not None and site.tensor not in self._model.constants:
            scopes = {self.opened.scopes[index] for index in (producer, *(index for index, _ in ends))}
            if len(scopes) == 1:
                return producer + 1, ends
        return min(index for index, _ in ends), ends

    @cached_property
    def _ends_of_outputs(self) -> Mapping[str, list[int]]:
        """The nodes that make or read each graph output, in their bodies too."""
        found: dict[str, list[int]] = {name: [] for name in self._model.outputs}
        for index, node in enumerate(self.opened.nodes):
            for name in {*node.input, *node.output, *names_read_inside(node)} & found.keys():
                found[name].append(index)
        return found


# ---- a raised opset, as number formats need it -------------------------------------------------------


def raised(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model at that opset, with the original opset in its metadata. `insert_qdq` does this when necessary."""
    higher = raise_opset(proto, opset)
    higher.metadata_props.add(key=RAISED_FROM, value=_version_text(proto))
    return higher


def _version_text(proto: onnx.ModelProto) -> str:
    """Opset and IR version of a model, for readers."""
    return f"opset {opset_of(proto)}, IR version {proto.ir_version}"


class OpenModel:
    """A model in the form that pairs are added to: flat, at one opset, with the weights that candidates refer to.

    ``light`` is the model with these weights. The ``notes`` are for a raised opset. ``inputs`` finds the consumers of
    the ``model`` among the ``nodes``, each in the graph of the path in ``scopes``.
    """

    def __init__(self, model: Model, light: Model, opset: int) -> None:
        self.model = model
        self.notes: tuple[str, ...] = ()
        if opset != model.opset or light.flat.ir_version < IR_WITH_FREE_INITIALIZERS:
            light = Model(raised(light.proto, opset))
            was = _version_text(model.proto)
            self.notes = (f"raised to opset {opset}, which its number formats need (was {was})",)
        self.flat = light.flat
        self.nodes = tuple(node.proto for node in light.nodes)
        self.scopes = tuple(node.scope for node in light.nodes)
        self.inputs = RaisedInputs(model, self.nodes, is_raised=bool(self.notes))


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
