"""The graph of a rehearsal: each Q/DQ pair that can be inserted at an edge is in the branch of an If node, a switch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Feed, Floats
from qdqspec.errors import PlacementError
from qdqspec.graph import Model, WeightStore
from qdqspec.graph.protos import (
    copied,
    copy_model,
    map_tensors,
    names_read_inside,
    opset_of,
    refill,
    size_of,
)
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.insert import OpenModel
from qdqspec.qdq.pairs import BIAS_INPUT, PairMaker, QuantSource
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.units import Edge
from qdqspec.types import Consumer, Label, Placement, Site

SwitchStates: TypeAlias = npt.NDArray[np.bool_]  # whether each switch is on, by number
_Input: TypeAlias = tuple[int, int]  # the index of a node, and of its input

_SPLIT_TAKES_NUMBER = 18  # the first opset whose Split has the number of outputs as an attribute
_PREFIX = "qdqspec.rehearsal:"  # of all added names
_SWITCHES = f"{_PREFIX}switches"
_SOURCE = "\0source"  # placeholder for the tensor that a pair quantizes, until the pair is in a branch


class Switches:
    """Switches by number, for the ``sites`` of all placements to be rehearsed: one for each consumer of a site.

    Pairs of operators of domain ``trt``, which the reference runtime lacks, have none.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        able = sorted((site for site in sites if not _is_foreign(site)), key=lambda site: site.row)
        every = dict.fromkeys(single for site in able for single in _singles(site))
        self._sites = tuple(every)
        self._number = {site: number for number, site in enumerate(self._sites)}

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        """The site of each switch, with its one consumer."""
        return iter(self._sites)

    def __getitem__(self, number: int) -> Site:
        return self._sites[number]

    def by_edge(self) -> dict[Edge, list[int]]:
        """The numbers of the switches on each edge, one for each format."""
        found: dict[Edge, list[int]] = {}
        for number, site in enumerate(self._sites):
            found.setdefault((site.tensor, site.consumers[0]), []).append(number)
        return found

    def numbers(self, site: Site) -> list[int]:
        """The numbers of the switches that a site covers. Raises `PlacementError` if one is missing."""
        singles = _singles(site)
        for single in singles:
            if single not in self._number:
                (end,) = single.consumers
                reader = f"input {end.input} of node '{end.node}'"
                where = f"graph output {end.input}" if end.is_output else reader
                raise PlacementError(
                    f"the rehearsal has no {single.format} pair on tensor '{single.tensor}' before {where}",
                    cure="rehearse placements of the space, or of the pairs, that it was opened with",
                )
        return [self._number[single] for single in singles]

    def floating(self, sites: Iterable[Site]) -> frozenset[Site]:
        """The sites of the switches that these cover."""
        able = (site for site in sites if not _is_foreign(site))
        return frozenset(self._sites[number] for site in able for number in self.numbers(site))

    def by_label(self, space: SchemeSpace) -> dict[tuple[str, Label], tuple[int, ...]]:
        """The numbers of the switches of each (unit, label) that can be rehearsed, everything else in float."""
        return {
            choice: tuple(dict.fromkeys(number for site in sites for number in self.numbers(site)))
            for choice, sites in _labelled_sites(space).items()
            if not any(map(_is_foreign, sites))
        }

    def setting(self, placement: Placement) -> SwitchStates:
        """The switches of a placement on, all others off. Raises `PlacementError` if one does not exist."""
        found = np.zeros(len(self), np.bool_)
        for site in placement.ordered:
            found[self.numbers(site)] = True
        return found


def _singles(site: Site) -> list[Site]:
    """A site for each consumer."""
    return [site if len(site.consumers) == 1 else replace(site, consumers=(end,)) for end in site.consumers]


def _labelled_sites(space: SchemeSpace) -> dict[tuple[str, Label], tuple[Site, ...]]:
    """The sites of each (unit, label) alone, everything else in floating point."""
    return {
        (unit.id, label): space.resolve({unit.id: label}).ordered
        for unit in space.units
        for label in (*unit.labels, *unit.halves)
        if label != "fp"
    }


def sites_of(space: SchemeSpace) -> tuple[Site, ...]:
    """The sites of every (unit, label) of a space."""
    return tuple(dict.fromkeys(site for sites in _labelled_sites(space).values() for site in sites))


def _is_foreign(site: Site) -> bool:
    fmt = number_format(site.format)
    return fmt.dynamic and not fmt.at_run_time


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedModel:
    """A model with switches ``numbers``, set by its ``input``; ``names`` are those of its outputs by edge."""

    proto: onnx.ModelProto
    input: str  # "" without switches
    numbers: tuple[int, ...]
    names: Mapping[Edge, str]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its inputs without the switches."""
        return tuple(i.name for i in self.proto.graph.input if i.name != self.input)

    def feed(self, setting: SwitchStates, inputs: Feed) -> Feed:
        """The feed of a run: these inputs, of which those with a default value may be absent, and the switches.

        The states cover all switches, also those that the model lacks.
        """
        found = {name: inputs[name] for name in self.inputs if name in inputs}
        return {**found, self.input: setting[list(self.numbers)]} if self.input else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bias:
    """The bias of a layer if its weight is quantized, and ``otherwise``; ``data`` is the switch it is rounded with."""

    value: str
    otherwise: str
    data: int | None


class SwitchGraph:
    """Builds models with switches from one model: the whole, and parts of it for single switches.

    ``nodes`` are those of the flat form of the model (`graph.flat`), so that pairs inside bodies have switches too.
    Weights are references to ``store``: models must be saved in its folder. Those of the switches ``floating`` are
    quantized when the model runs, and not stored as integers. Biases of the ops ``rounds_biases`` are rounded where the
    weight is quantized (`qdqspec.qdq.capabilities.Capabilities`). Raises `PlacementError` if a pair does not fit,
    `ModelError` if the opset cannot be raised.
    """

    def __init__(
        self,
        model: Model,
        switches: Switches,
        numbers: QuantSource,
        store: WeightStore,
        *,
        floating: frozenset[Site] = frozenset(),
        rounds_biases: Collection[str] = (),
    ) -> None:
        self._model = model
        self._rounds_biases = rounds_biases
        self._switches = switches
        self._edges = switches.by_edge()
        maker = PairMaker(model, numbers, floating=floating, store=store)
        self._pairs = [maker.make(site, source=_SOURCE) for site in switches]
        light = Model(map_tensors(model.proto, store.externalize))
        opened = OpenModel(model, light, max([model.opset, *(pair.opset for pair in self._pairs)]))
        self._base, self.nodes = opened.flat, opened.nodes
        self._scopes, self._raised = opened.scopes, opened.inputs
        # the inputs of each consumer after the opset was raised; of a graph output, a place after all nodes
        self._inputs: dict[Edge, list[_Input]] = {
            (tensor, end): [(len(self.nodes), 0)]
            if end.is_output
            else self._raised.of(tensor, end, [end], "rehearsed", "build the placement and measure it")
            for tensor, end in self._edges
        }
        # the index of the node that the switches of an edge precede; for graph outputs, the number of nodes
        self.places = {edge: min(index for index, _ in inputs) for edge, inputs in self._inputs.items()}
        self._biased = {n: bias for n in range(len(self._pairs)) if (bias := self._bias_of(n)) is not None}

    @property
    def needed_bytes(self) -> int:
        """The memory of all weights: a switched one is copied while its reader runs, a float one may be too."""
        integers = (pair.integer for pair in self._pairs if pair.integer is not None)
        return 2 * sum(map(size_of, self._base.graph.initializer)) + sum(map(size_of, integers))

    def is_behind(self, edge: Edge, start: int) -> bool:
        """Whether the value of an edge is computed by the node ``start`` or a later one, or by a switch there."""
        made = self._raised.producer.get(edge[0])
        return (made is not None and made >= start) or self.places.get(edge, -1) >= start

    def head(self, stop: int, tensors: Sequence[str]) -> SwitchedModel:
        """The nodes before ``stop`` without switches, with these tensors as outputs."""
        return self._assembled(range(stop), (), (), {(name, Consumer("", 0)): name for name in tensors})

    def part(self, low: int, high: int, wanted: Iterable[Edge]) -> SwitchedModel:
        """The nodes from ``low`` on, with the switches before ``high``, and the values of these edges as outputs.

        Outputs of earlier nodes become inputs.
        """
        edges = [edge for edge in self._edges if low <= self.places[edge] < high]
        names = {edge: self._value(edge) if edge in edges else edge[0] for edge in wanted}
        return self._assembled(range(low, len(self.nodes)), edges, self.live(low) if low else (), names)

    def live(self, index: int) -> tuple[str, ...]:
        """The activations that are computed before the node of that index, and read at or after it."""
        made = {name for node in self.nodes[:index] if _computes(node) for name in node.output if name}
        read = {name for node in self.nodes[index:] for name in (*node.input, *names_read_inside(node))}
        return tuple(sorted(made & (read | set(self._model.outputs))))

    def live_sizes(self) -> Floats:
        """The number of elements of `live` at each index; infinite where the model cannot be cut, as inside a body."""
        last: dict[str, int] = dict.fromkeys(self._model.outputs, len(self.nodes))
        for index, node in enumerate(self.nodes):
            last |= {name: max(index, last.get(name, 0)) for name in (*node.input, *names_read_inside(node))}
        sizes = np.zeros(len(self.nodes) + 1)
        for name, made in self._raised.producer.items():
            if _computes(self.nodes[made]):
                size = prod(dim or 1 for dim in self._model.shape(name) or ())
                sizes[made + 1 : last.get(name, -1) + 1] += size if self._model.elem_type(name) else np.inf
        sizes[:-1][[bool(scope) for scope in self._scopes]] = np.inf
        return sizes

    def _assembled(
        self, nodes: range, edges: Sequence[Edge], live: tuple[str, ...], names: Mapping[Edge, str]
    ) -> SwitchedModel:
        numbers = tuple(number for edge in edges for number in self._edges[edge])
        graph_nodes = list(self._switched(nodes, edges))
        if numbers:  # the input of the switches, split into the condition of each
            conditions = [self._name(number, "condition") for number in numbers]
            split = helper.make_node("Split", [_SWITCHES], conditions, axis=0)
            if opset_of(self._base) >= _SPLIT_TAKES_NUMBER:
                split.attribute.append(helper.make_attribute("num_outputs", len(numbers)))
            graph_nodes.insert(0, split)
        constants = [c for number in numbers for c in self._constants(number)]
        read = {name for node in graph_nodes for name in (*node.input, *names_read_inside(node))}
        read |= set(names.values())
        proto = copy_model(self._base, but={"node", "initializer", "input", "output", "value_info"})
        proto.graph.node.extend(graph_nodes)
        proto.graph.initializer.extend(
            t for t in (*self._base.graph.initializer, *constants) if t.name in read
        )
        proto.graph.input.extend(i for i in self._base.graph.input if i.name in read)
        proto.graph.input.extend(self._info(name) for name in live)
        if numbers:
            info = helper.make_tensor_value_info(_SWITCHES, TensorProto.BOOL, [len(numbers)])
            proto.graph.input.append(info)
        wanted = dict.fromkeys((value, edge[0]) for edge, value in names.items())
        proto.graph.output.extend(self._info(value, of=tensor) for value, tensor in wanted)
        proto = self._model.close_bodies(proto)
        switch_input = _SWITCHES if numbers else ""
        return SwitchedModel(proto=proto, input=switch_input, numbers=numbers, names=names)

    def _switched(self, nodes: range, edges: Sequence[Edge]) -> Iterable[onnx.NodeProto]:
        """The nodes in order, each after the switches that precede it, including the constants of earlier nodes."""
        by_place: dict[int, list[Edge]] = {}
        instead: dict[int, dict[int, str]] = {}  # replacements of node inputs
        for edge in edges:
            by_place.setdefault(self.places[edge], []).append(edge)
            for index, number in self._inputs[edge]:
                instead.setdefault(index, {})[number] = self._value(edge)
                if not self._biased.keys().isdisjoint(self._edges[edge]):
                    instead[index][BIAS_INPUT] = self._name(self._edges[edge][-1], "bias")
        yield from (node for node in self.nodes[: nodes.start] if not _computes(node))
        for index in nodes:
            for edge in by_place.pop(index, ()):
                yield from self._switch(edge)
            node = self.nodes[index]
            if index in instead:
                node = copied(node)
                for number, name in sorted(instead[index].items()):
                    if number == len(node.input):  # the layer has no bias of its own
                        node.input.append(name)
                    else:
                        node.input[number] = name
            yield node
        for edge in chain.from_iterable(by_place.values()):  # switches before graph outputs
            yield from self._switch(edge)

    def _switch(self, edge: Edge) -> Iterator[onnx.NodeProto]:
        """An If for each pair of the edge: it returns the value that the pair makes, or else the value before it.

        It returns the bias of the layer that reads the tensor, too, if a pair of the edge changes that.
        """
        tensor, numbers = edge[0], self._edges[edge]
        before = {"value": tensor}
        if biases := [self._biased[number] for number in numbers if number in self._biased]:
            before["bias"] = biases[0].otherwise
        for number in numbers:
            made = []
            for template in self._pairs[number].nodes:
                node = copied(template)
                node.name = self._name(number, template.name)
                for names in (node.input, node.output):
                    refill(names, [tensor if name == _SOURCE else self._name(number, name) for name in names])
                made.append(node)
            on = [self._name(number, self._pairs[number].output)]
            if biases:
                on.append(self._name(number, "bias:then"))
                made += self._bias_nodes(number, biases[0].otherwise, on[1])
            off, own = ([self._name(number, f"{word}{kind}") for kind in before] for word in ("float:", ""))
            kept = [_identity(source, name) for source, name in zip(before.values(), off, strict=True)]
            branches = {
                "then_branch": self._body("on", made, on, tensor),
                "else_branch": self._body("off", kept, off, tensor),
            }
            condition, name = (self._name(number, word) for word in ("condition", "if"))
            yield helper.make_node("If", [condition], own, name=name, **branches)
            before = dict(zip(before, own, strict=True))

    def _body(
        self, name: str, nodes: Sequence[onnx.NodeProto], outputs: Iterable[str], tensor: str
    ) -> onnx.GraphProto:
        """A branch whose outputs have the type of a tensor."""
        return helper.make_graph(nodes, name, [], [self._info(output, of=tensor) for output in outputs])

    def _bias_nodes(self, number: int, otherwise: str, out: str) -> list[onnx.NodeProto]:
        """The nodes that compute the bias if the pair of its layer's weight is on: corrected, rounded, or both."""
        bias = self._biased.get(number)
        if bias is None or bias.data is None:
            return [_identity(otherwise if bias is None else bias.value, out)]
        data, weight = (self._name(n, self._pairs[n].constants[0].name) for n in (bias.data, number))
        step, steps, whole = (self._name(number, f"bias:{name}") for name in ("step", "steps", "whole"))
        return [
            helper.make_node("Mul", [data, weight], [step], name=step),
            helper.make_node("Div", [bias.value, step], [steps], name=steps),
            helper.make_node("Round", [steps], [whole], name=whole),
            helper.make_node("Mul", [whole, step], [out], name=out),
        ]

    def _bias_of(self, number: int) -> _Bias | None:
        """The bias of the layer that reads a weight, if it is another one while the pair is on."""
        site, pair, end = self._switches[number], self._pairs[number], self._switches[number].consumers[0]
        node = None if end.is_output else self._model.by_name[end.node]
        data = None
        if node is not None and site.weight and node.op_type in self._rounds_biases:
            # the pair, with one scale, on the data of the layer, whose bias is rounded with both scales
            inputs = self._edges.get((node.inputs[0], Consumer(node.name, 0)), ())
            scaled = (n for n in inputs if self._pairs[n].constants and self._switches[n].axis is None)
            data = None if number_format(site.format).block else next(scaled, None)
        if pair.bias is not None:
            on, off = self._name(number, "bias:on"), self._name(number, "bias:off")
            return _Bias(value=on, otherwise=off if pair.bias.is_added else pair.bias.value.name, data=data)
        own = "" if data is None or node is None else node.input_at(BIAS_INPUT)
        return _Bias(value=own, otherwise=own, data=data) if own in self._model.constants else None

    def _constants(self, number: int) -> Iterable[TensorProto]:
        pair = self._pairs[number]
        for made in (*pair.constants, *([] if pair.integer is None else [pair.integer])):
            tensor = copied(made)
            tensor.name = self._name(number, made.name)
            yield tensor
        if pair.bias is not None:
            value = numpy_helper.to_array(pair.bias.value)
            yield numpy_helper.from_array(value, self._name(number, "bias:on"))
            if pair.bias.is_added:
                yield numpy_helper.from_array(np.zeros_like(value), self._name(number, "bias:off"))

    def _value(self, edge: Edge) -> str:
        return self._name(self._edges[edge][-1], "value")

    def _name(self, number: int, name: str) -> str:
        return f"{_PREFIX}{number}:{name}"

    def _info(self, name: str, of: str | None = None) -> onnx.ValueInfoProto:
        known = self._model.elem_type(of or name)
        if known is None:
            return onnx.ValueInfoProto(name=name)
        return helper.make_tensor_value_info(name, known, None)


def _identity(source: str, name: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [source], [name], name=name)


def _computes(node: onnx.NodeProto) -> bool:
    return node.op_type != "Constant"
