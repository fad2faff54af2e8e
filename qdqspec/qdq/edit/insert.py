"""Inserts the Q/DQ pairs of a placement into a model; all other nodes, and their fields, stay unchanged.

The pairs are made with onnx-graphsurgeon (`qdqspec.qdq.edit.pairs`), and added to the nodes of the model's protobuf,
because a round trip of a whole model through graphsurgeon changes it. See
docs/decisions/0002-insertion-into-the-own-protobuf.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import onnx
from onnx import TensorProto

from qdqspec.errors import PlacementError
from qdqspec.graph.dynamic_kernels import with_kernels
from qdqspec.graph.flat import closed, flat_form, scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS
from qdqspec.graph.protos import (
    copied,
    copy_model,
    map_tensors,
    names_read_inside,
    refill,
    rename_tensors,
    with_value,
)
from qdqspec.graph.trt import DOMAIN, VERSION, is_pair_op
from qdqspec.graph.weights import WeightStore
from qdqspec.qdq.edit.pairs import Pair, PairMaker, QuantSource, makes_output
from qdqspec.qdq.edit.raised import RaisedInputs, raised, version_text
from qdqspec.qdq.quantize.formats import RUN_TIME
from qdqspec.types import Consumer, Placement, Site

__all__ = ["Inserted", "Inserter", "QuantSource", "insert_qdq"]

Ends: TypeAlias = tuple[tuple[int, int], ...]  # inputs of nodes: (index of the node, number of the input)


@dataclass(frozen=True)
class Inserted:
    """A model with Q/DQ pairs, and notes for the reader."""

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()


def insert_qdq(
    model: Model,
    placement: Placement,
    numbers: QuantSource,
    *,
    floating: frozenset[Site] = frozenset(),
) -> Inserted:
    """The model with the pairs of a placement; `Inserter` makes many candidates of one model.

    Raises `PlacementError` if a site does not fit, `ModelError` if the opset cannot be raised.
    """
    return Inserter(model, numbers, floating=floating).insert(placement)


class _Insert(NamedTuple):
    """The pair of a site."""

    site: Site
    pair: Pair


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
        self._inserts: dict[tuple[str, str], list[_Insert]] = {}  # by row of the site and its source
        self._bases: dict[int, _Base] = {}  # by opset
        self._proto = model.proto if store is None else map_tensors(model.proto, store.externalize)
        self._flat = model.flat if store is None else flat_form(self._proto)

    def insert(self, placement: Placement) -> Inserted:
        """The model with these pairs. Raises `PlacementError` naming tensor and model."""
        sites = placement.ordered
        outputs = [site.tensor for site in sites if makes_output(site)]
        floats = {tensor: self._maker.float_name(tensor) for tensor in outputs}
        inserts = [one for site in sites for one in self._make_once(site, floats.get(site.tensor, ""))]
        opset = max((self._model.opset, *(insert.pair.opset for insert in inserts)))
        if opset not in self._bases:
            self._bases[opset] = _Base(self._model, self._maker, self._proto, self._flat, opset)
        base = self._bases[opset]
        candidate = base.with_pairs(inserts, floats)
        if candidate is None or len(floats) < len(outputs):
            raise self._explain_overlap(sites)
        if any(site.format == RUN_TIME for site in sites):
            candidate = with_kernels(candidate)
        if self._model.has_bodies:  # integers go where the float weight is
            integers = ((insert.pair.integer, insert.site.tensor) for insert in inserts)
            instead = {integer.name: tensor for integer, tensor in integers if integer is not None}
            candidate = closed(candidate, instead)
        return Inserted(candidate, base.notes)

    def _make_once(self, site: Site, source: str) -> list[_Insert]:
        """The pairs of a site, one for each graph that reads it, made once. ``source`` is a graph output's new name."""
        known = self._inserts.get((site.row, source))
        if known is None:
            make = self._maker.make
            known = [_Insert(part, make(part, source=source, whole=site)) for part in self._split(site)]
            self._inserts[site.row, source] = known
        return known

    def _split(self, site: Site) -> list[Site]:
        """A site split by the graphs that read it, as kernels are fused within a graph."""
        if not self._model.has_bodies:
            return [site]
        ends: dict[str, list[Consumer]] = {}
        for end in site.consumers:
            node = self._model.by_name.get(end.node)
            ends.setdefault(node.scope if node is not None else "", []).append(end)
        return [site if len(ends) == 1 else replace(site, consumers=tuple(some)) for some in ends.values()]

    def _explain_overlap(self, sites: Iterable[Site]) -> PlacementError:
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


class _Base:
    """The model at one opset, that candidates are made of."""

    def __init__(
        self, model: Model, maker: PairMaker, proto: onnx.ModelProto, flat: onnx.ModelProto, opset: int
    ) -> None:
        self.notes: tuple[str, ...] = ()
        if opset > model.opset or proto.ir_version < IR_WITH_FREE_INITIALIZERS:
            flat = flat_form(raised(proto, opset))
            was = version_text(model.proto)
            self.notes = (f"raised to opset {opset}, which its number formats need (was {was})",)
        self.model, self.maker = model, maker
        self.nodes = list(flat.graph.node)
        self.weights = list(flat.graph.initializer)
        self.weight = {tensor.name: i for i, tensor in enumerate(self.weights)}
        self.constant = {n.output[0]: i for i, n in enumerate(self.nodes) if n.op_type == "Constant"}
        self.around = copy_model(flat, but={"node", "initializer"})
        self._scopes = tuple(scopes_of(self.nodes)) if model.has_bodies else ()
        self._raised = RaisedInputs(model, self.nodes, is_raised=bool(self.notes))
        self._places: dict[Site, tuple[int, Ends]] = {}

    def with_pairs(self, inserts: Sequence[_Insert], floats: Mapping[str, str]) -> onnx.ModelProto | None:
        """The model with these pairs; ``None`` if two of them are for one input. ``floats`` rename graph outputs."""
        placed = sorted(((*self._place(one.site), one) for one in inserts), key=lambda each: each[0])
        reads = {end: insert.pair.output for _, ends, insert in placed for end in ends}
        if len(reads) < sum(len(ends) for _, ends, _ in placed):
            return None
        made = _Candidate(self)
        for index in {index for name in floats for index in self._ends_of_outputs[name]}:
            rename_tensors(made.node(index), lambda name: floats.get(name, name))
        for (index, number), name in reads.items():
            made.node(index).input[number] = name
        before: defaultdict[int, list[Pair]] = defaultdict(list)  # pairs by the node that they come before
        for index, ends, (_, pair) in placed:
            before[index].append(pair)
            if pair.bias is not None and pair.bias.is_added:
                made.node(ends[0][0]).input.append(pair.bias.value.name)
            elif pair.bias is not None:
                made.replace_constant(pair.bias.value.name, pair.bias.value)
        made.store_weights([insert for _, _, insert in placed])
        return made.proto(before)

    def _place(self, site: Site) -> tuple[int, Ends]:
        """The index of the node that a pair comes before, and the inputs that read it."""
        if site not in self._places:
            self._places[site] = self._find_place(site)
        return self._places[site]

    def _find_place(self, site: Site) -> tuple[int, Ends]:
        """The pair after the producer of the tensor, or before the first reader: in the graph of the readers."""
        cure = "choose a number format that needs no newer opset, or export the model with a newer one"
        places = [
            place
            for end in site.consumers
            if not end.is_output
            for place in self._raised.of(site.tensor, end, site.consumers, "quantized", cure)
        ]
        ends = tuple(dict.fromkeys(places))
        producer = self._raised.producer.get(site.tensor)
        is_captured = (
            producer is not None
            and self._scopes
            and any(self._scopes[index] != self._scopes[producer] for index, _ in ends)
        )
        if producer is None or site.tensor in self.model.constants or is_captured:
            return min(index for index, _ in ends), ends
        return producer + 1, ends

    @cached_property
    def _ends_of_outputs(self) -> Mapping[str, list[int]]:
        """The nodes that make or read each graph output, in their bodies too."""
        found: dict[str, list[int]] = {name: [] for name in self.model.outputs}
        for index, node in enumerate(self.nodes):
            for name in {*node.input, *node.output, *names_read_inside(node)} & found.keys():
                found[name].append(index)
        return found


class _Candidate:
    """The model of a base while it is edited: copies of the nodes that change, the weights, and what is around them."""

    def __init__(self, base: _Base) -> None:
        self._base = base
        self._edited: dict[int, onnx.NodeProto] = {}
        self._weights = list(base.weights)
        self._model = copied(base.around)

    def node(self, index: int) -> onnx.NodeProto:
        """A node of the base, to be changed."""
        if index not in self._edited:
            self._edited[index] = copied(self._base.nodes[index])
        return self._edited[index]

    def proto(self, before: Mapping[int, Sequence[Pair]]) -> onnx.ModelProto:
        """The model with the nodes and constants of the pairs ``before`` each node."""
        graph, nodes = self._model.graph, list[onnx.NodeProto]()
        for index in range(len(self._base.nodes) + 1):
            for pair in before.get(index, ()):
                nodes += pair.nodes
                graph.initializer.extend(pair.constants)
                if pair.bias is not None and pair.bias.is_added:
                    graph.initializer.append(pair.bias.value)
            nodes += [self._edited.get(index, node) for node in self._base.nodes[index : index + 1]]
        graph.node.extend(nodes)
        opsets, pairs = self._model.opset_import, (pair for some in before.values() for pair in some)
        if all(opset.domain != DOMAIN for opset in opsets) and any(
            is_pair_op(node) for pair in pairs for node in pair.nodes
        ):
            opsets.add(domain=DOMAIN, version=VERSION)
        graph.initializer.extend(self._weights)
        return self._model

    def replace_constant(self, name: str, value: TensorProto) -> None:
        """Store another value in the place of a constant."""
        if name in self._base.weight:
            self._weights[self._base.weight[name]] = value
        else:
            node = self.node(self._base.constant[name])
            node.CopyFrom(with_value(node, value))
            node.output[0] = value.name

    def store_weights(self, inserts: Sequence[_Insert]) -> None:
        """Store an integer weight in the place of the float weight, or beside a float weight that other nodes read.

        Of the pairs of a weight the first in the graph takes its place, because stripping finds that one first.
        """
        stored = [(site, pair.integer) for site, pair in inserts if pair.integer is not None]
        covered, replaced = Counter[str](), set()
        for site, _ in stored:
            covered[site.tensor] += (
                len(set(site.consumers)) if self._base.maker.is_private(site.tensor) else 0
            )
        for site, integer in stored:
            if covered.pop(site.tensor, 0) == len(self._base.model.consumers.get(site.tensor, ())):
                self.replace_constant(site.tensor, integer)
                replaced.add(site.tensor)
            else:
                self._weights.append(integer)
        inputs = self._model.graph.input
        if any(value.name in replaced for value in inputs):  # callers can no longer feed the float weight
            refill(inputs, [value for value in inputs if value.name not in replaced])
