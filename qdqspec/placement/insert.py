"""Putting the Q/DQ pairs of a placement into a model, leaving everything else byte for byte as it was.

May import floors 0 to 2, numpy and onnx. The pairs are onnx-graphsurgeon's (`placement.pairs`); they are
spliced into the protobuf of the model, because a round trip of a whole model through graphsurgeon changes
it: see docs/decisions/0002-insertion-splices-graphsurgeon-nodes.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS, opset_of, raise_opset
from qdqspec.graph.protos import copy_model, map_tensors, refill
from qdqspec.graph.weights import WeightStore
from qdqspec.placement.pairs import Pair, PairMaker, QuantSource
from qdqspec.types import Consumer, Placement, Site

__all__ = ["RAISED_FROM", "Inserted", "Inserter", "QuantSource", "WeightMode", "insert_qdq"]

WeightMode: TypeAlias = Literal["integer", "float"]

RAISED_FROM = "qdqspec.raised_from"  # model metadata: opset and IR version before they were raised


@dataclass(frozen=True, slots=True)
class Inserted:
    """A model with Q/DQ pairs, and what a reader should know of how it came to be."""

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()


def insert_qdq(
    model: Model,
    placement: Placement,
    numbers: QuantSource,
    *,
    weights: WeightMode = "integer",
    floating: frozenset[Site] = frozenset(),
) -> Inserted:
    """The model with the pairs of a placement; `Inserter` makes many candidates of one model.

    Weights at the sites ``floating`` stay float whatever ``weights`` says.
    Raises `PlacementError` where a site does not fit, `ModelError` where the opset cannot be raised.
    """
    return Inserter(model, numbers, weights=weights, floating=floating).insert(placement)


class Inserter:
    """Makes candidates of one model; what they share is prepared once.

    An activation gets a QuantizeLinear and a DequantizeLinear, and only the site's consumers read their
    output. A weight is stored as integers behind a DequantizeLinear, or with ``weights="float"``, and at the
    sites ``floating`` always, as it was with both before its consumers. With a ``store``, candidates refer to
    weights there, and are to be saved in its folder.
    """

    def __init__(
        self,
        model: Model,
        numbers: QuantSource,
        *,
        weights: WeightMode = "integer",
        floating: frozenset[Site] = frozenset(),
        store: WeightStore | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._maker = PairMaker(
            model, numbers, integer_weights=weights == "integer", floating=floating, store=store
        )
        self._pairs: dict[Site, Pair] = {}
        self._bases: dict[int, _Base] = {}
        self._proto = model.proto if store is None else map_tensors(model.proto, store.externalize)

    def insert(self, placement: Placement) -> Inserted:
        """The model with these pairs. Raises `PlacementError` naming tensor and model."""
        sites = sorted(placement.sites, key=lambda site: (site.tensor, site.consumers))
        self._check_disjoint(sites)
        pairs = {site: self._pair(site) for site in sites}
        base = self._base(max([self._model.opset, *(pair.opset for pair in pairs.values())]))
        splice = _Splice(self._model, base)
        for site, pair in pairs.items():
            splice.add(site, pair)
        for tensor in self._replaced(sites):
            splice.replace(tensor)
        return Inserted(splice.build(), base.notes)

    def _pair(self, site: Site) -> Pair:
        if site not in self._pairs:
            self._pairs[site] = self._maker.make(site)
        return self._pairs[site]

    def _check_disjoint(self, sites: Iterable[Site]) -> None:
        seen: set[Consumer] = set()
        for site in sites:
            for end in site.consumers:
                if end in seen:
                    raise PlacementError(
                        f"two sites of the placement feed input {end.input} of node '{end.node}' "
                        f"from tensor '{site.tensor}'",
                        where=self._model.where,
                        cure="name each consumer in one site only",
                    )
                seen.add(end)

    def _replaced(self, sites: Iterable[Site]) -> list[str]:
        """Float weights that nobody reads any more once these sites are stored as integers."""
        read: dict[str, int] = {}
        for site in sites:
            if self._maker.stores_integers(site) and self._maker.is_private(site.tensor):
                read[site.tensor] = read.get(site.tensor, 0) + len(set(site.consumers))
        return [tensor for tensor, count in read.items() if count == len(self._model.consumers[tensor])]

    def _base(self, opset: int) -> _Base:
        if opset not in self._bases:
            self._bases[opset] = _prepare(self._model, self._proto, opset)
        return self._bases[opset]


def raised(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model at that opset, remembering where it came from. What `insert_qdq` does when it must."""
    higher = raise_opset(proto, opset)
    higher.metadata_props.add(key=RAISED_FROM, value=_version(proto))
    return higher


def _version(proto: onnx.ModelProto) -> str:
    return f"opset {opset_of(proto)}, IR version {proto.ir_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """A model taken apart, at one opset: what candidates are put together from."""

    frame: onnx.ModelProto  # all but nodes and initializers
    nodes: tuple[onnx.NodeProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    producer: dict[str, int]
    notes: tuple[str, ...]
    spots: dict[str, _Spot] = field(
        default_factory=dict
    )  # what was found out, by what a pair's consumers read


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a site's nodes go in the base: before or after node ``anchor``; ``ends`` are (node, input)."""

    site: Site
    ends: tuple[tuple[int, int], ...]
    anchor: int
    after: bool


def _prepare(model: Model, proto: onnx.ModelProto, opset: int) -> _Base:
    notes: tuple[str, ...] = ()
    if opset > model.opset or proto.ir_version < IR_WITH_FREE_INITIALIZERS:
        proto = raised(proto, opset)
        notes = (f"raised to opset {opset}, which its number formats need (was {_version(model.proto)})",)
    nodes = tuple(proto.graph.node)
    return _Base(
        frame=copy_model(proto, but={"node", "initializer"}),
        nodes=nodes,
        initializers=tuple(proto.graph.initializer),
        producer={name: index for index, node in enumerate(nodes) for name in node.output if name},
        notes=notes,
    )


@dataclass(slots=True)
class _Splice:
    """One candidate under way."""

    model: Model
    base: _Base
    before: dict[int, list[onnx.NodeProto]] = field(default_factory=dict)
    after: dict[int, list[onnx.NodeProto]] = field(default_factory=dict)
    rewired: dict[int, onnx.NodeProto] = field(default_factory=dict)
    added: list[onnx.TensorProto] = field(default_factory=list)
    integers: dict[str, onnx.TensorProto] = field(default_factory=dict)  # first integer form by weight
    replaced: set[str] = field(default_factory=set)

    def add(self, site: Site, pair: Pair) -> None:
        """Place the pair's nodes and constants, and let the site's consumers read it."""
        spot = self.base.spots.get(pair.output)
        if spot is None or spot.site != site:
            spot = self.base.spots[pair.output] = self._spot(site)
        aside = self.after if spot.after else self.before
        aside.setdefault(spot.anchor, []).extend(pair.nodes)
        if pair.output != site.tensor:
            for index, position in spot.ends:
                self._writable(index).input[position] = pair.output
        if pair.integer is not None and site.tensor not in self.integers:
            self.integers[site.tensor] = pair.integer
        elif pair.integer is not None:
            self.added.append(pair.integer)
        self.added.extend(pair.constants)

    def _spot(self, site: Site) -> _Spot:
        ends = tuple((self._node_index(end, site), end.input) for end in site.consumers)
        producer = self.base.producer.get(site.tensor)
        if producer is None or site.tensor in self.model.constants:
            return _Spot(site, ends, min(index for index, _ in ends), after=False)
        return _Spot(site, ends, producer, after=True)

    def replace(self, weight: str) -> None:
        """Let the integers stand in the place of the float weight."""
        self.replaced.add(weight)
        index = self.base.producer.get(weight)
        if index is not None:
            constant = self._writable(index)
            integers = self.integers[weight]
            constant.output[0] = integers.name
            next(a for a in constant.attribute if a.name == "value").t.CopyFrom(integers)

    def build(self) -> onnx.ModelProto:
        """Put the candidate together."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.base.frame)
        proto.graph.node.extend(self._nodes())
        proto.graph.initializer.extend(self._initializers())
        if any(i.name in self.replaced for i in proto.graph.input):
            refill(proto.graph.input, [i for i in proto.graph.input if i.name not in self.replaced])
        return proto

    def _nodes(self) -> list[onnx.NodeProto]:
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(self.base.nodes):
            nodes.extend(self.before.get(index, ()))
            nodes.append(self.rewired.get(index, node))
            nodes.extend(self.after.get(index, ()))
        return nodes

    def _initializers(self) -> list[onnx.TensorProto]:
        kept = [self.integers[t.name] if t.name in self.replaced else t for t in self.base.initializers]
        beside = [integers for weight, integers in self.integers.items() if weight not in self.replaced]
        return [*kept, *beside, *self.added]

    def _writable(self, index: int) -> onnx.NodeProto:
        if index not in self.rewired:
            self.rewired[index] = onnx.NodeProto()
            self.rewired[index].CopyFrom(self.base.nodes[index])
        return self.rewired[index]

    def _node_index(self, end: Consumer, site: Site) -> int:
        """Where the consumer stands in the base, whose opset may be higher than the model's."""
        node = self.model.by_name[end.node]
        index = node.index
        if self.base.notes:
            index = next((self.base.producer[o] for o in node.outputs if o in self.base.producer), -1)
        if index < 0 or self.base.nodes[index].input[end.input : end.input + 1] != [site.tensor]:
            raise PlacementError(
                f"tensor '{site.tensor}' cannot be quantized: raising the opset changed node '{end.node}'",
                where=self.model.where,
                cure="choose a number format that needs no newer opset, or export the model with a newer one",
            )
        return index
