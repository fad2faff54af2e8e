"""The graph of a rehearsal: a model in which every Q/DQ pair is in the branch of an If node of its own.

The pairs are those of insertion (`placement.edit.pairs`), so that the rehearsed arithmetic equals that of the inserted
pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.arrays import Array, Feed, Floats
from qdqspec.graph.flat import closed, flat_form, scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS, opset_of, raise_opset
from qdqspec.graph.protos import copied, copy_model, map_tensors, names_read_inside, refill, size_of
from qdqspec.graph.weights import WeightStore
from qdqspec.measurement.engines import Engines
from qdqspec.placement.edit.biases import BIAS_INPUT
from qdqspec.placement.edit.pairs import Pair, PairMaker, QuantSource
from qdqspec.placement.edit.raised import RaisedInputs
from qdqspec.placement.space.units import Edge
from qdqspec.quantize.formats import number_format
from qdqspec.quantize.scales import REALS
from qdqspec.rehearsal.switches import Switches, SwitchStates
from qdqspec.types import Consumer, Site

Values: TypeAlias = dict[Edge, Array]
_Input: TypeAlias = tuple[int, int]  # the index of a node, and of its input

_SPLIT_TAKES_NUMBER = 18  # the first opset whose Split has the number of outputs as an attribute
# Types of single numbers of activations that can be inputs: those that Split takes.
_PACKED = frozenset(
    getattr(TensorProto, name) for name in ("FLOAT", "FLOAT16", "UINT8", "INT8", "UINT16", "INT16")
)
_NEVER = 1e15  # elements: more than any tensor has; sums of it are exact
_SOURCE = "\0source"  # placeholder for the tensor that a pair quantizes, until the pair is in a branch


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedModel:
    """A model with switches. ``input`` takes the settings of the switches ``numbers``, in order; "" if there are none.

    ``names`` are the names of its outputs by the edges whose values they hold. ``adjustable`` are the scales and zero
    points that can be fed, by the input that has those of one type: inputs with default values.
    """

    proto: onnx.ModelProto
    input: str
    numbers: tuple[int, ...]
    names: Mapping[Edge, str]
    adjustable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its inputs without the switches and the numbers of pairs."""
        own = {self.input, *self.adjustable}
        return tuple(i.name for i in self.proto.graph.input if i.name not in own)

    def run(
        self, engines: Engines, setting: SwitchStates, feed: Feed, adjusted: Mapping[str, Array] | None = None
    ) -> Values:
        """The values that its engines compute, by edge; ``setting`` covers all switches, also those it lacks.

        Inputs with a default value may be absent from ``feed``. Outputs that are not arrays are omitted.
        """
        return self._by_edge(engines.run(self._given(setting, feed, adjusted)))

    def run_each(
        self,
        engines: Engines,
        runs: Iterable[tuple[SwitchStates, Feed]],
        adjusted: Mapping[str, Array] | None = None,
    ) -> Iterator[Values]:
        """The values of each run, in order, several computed at the same time."""
        given = (self._given(setting, feed, adjusted) for setting, feed in runs)
        return map(self._by_edge, engines.run_each(given))

    def _given(self, setting: SwitchStates, feed: Feed, adjusted: Mapping[str, Array] | None) -> Feed:
        given = {name: feed[name] for name in self.inputs if name in feed} | dict(adjusted or {})
        if self.input:
            given[self.input] = setting[list(self.numbers)]
        return given

    def _by_edge(self, found: Mapping[str, Array]) -> Values:
        return {edge: found[name] for edge, name in self.names.items() if name in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bias:
    """The bias of a layer: the tensor if its weight is quantized, and ``otherwise``.

    ``data`` is the switch whose scale it is rounded with; ``None`` if it is not.
    """

    value: str
    otherwise: str
    data: int | None


class SwitchGraph:
    """Builds models with switches from one model: the whole, and parts of it for single switches.

    ``nodes`` are those of the flat form of the model (`graph.flat`), so that pairs inside bodies have switches too.
    Weights are references to ``store``: models must be saved in its folder. Biases of the ops ``rounds_biases`` are
    rounded where the weight is quantized (`qdqspec.backends.base.Capabilities`). Raises `PlacementError` if a pair does
    not fit, `ModelError` if the opset cannot be raised.
    """

    def __init__(
        self,
        model: Model,
        switches: Switches,
        maker: PairMaker,
        store: WeightStore,
        rounds_biases: Collection[str] = (),
    ) -> None:
        self._model = model
        self._rounds_biases = rounds_biases
        self._switches = switches
        self._edges = switches.by_edge()
        self._pairs: list[Pair] = [maker.make(site, source=_SOURCE) for site in switches]
        light = map_tensors(model.proto, store.externalize)
        opset = max([model.opset, *(pair.opset for pair in self._pairs)])
        raised = opset > model.opset or light.ir_version < IR_WITH_FREE_INITIALIZERS
        self._base = flat_form(raise_opset(light, opset) if raised else light)
        self.nodes: tuple[onnx.NodeProto, ...] = tuple(self._base.graph.node)
        self._raised = RaisedInputs(model, self.nodes, is_raised=raised)
        # A prefix that no name of the model has.
        prefix = "rehearsal:"
        while any(name.startswith(prefix) for name in _names(self._base)):
            prefix += ":"
        self._prefix = prefix
        self._switch_input = f"{prefix}switches"
        self._inputs = {edge: self._places(edge) for edge in self._edges}
        self._at = {edge: min(index for index, _ in inputs) for edge, inputs in self._inputs.items()}
        self._biased = {n: bias for n in range(len(self._pairs)) if (bias := self._bias_of(n)) is not None}

    @property
    def needed_bytes(self) -> int:
        """The memory of all weights: a switched one is copied while its reader runs, a float one may be too."""
        integers = (pair.integer for pair in self._pairs if pair.integer is not None)
        return 2 * sum(map(size_of, self._base.graph.initializer)) + sum(map(size_of, integers))

    def place(self, edge: Edge) -> int:
        """The index of the node that a switch precedes; for graph outputs, the number of nodes."""
        return self._at[edge]

    def is_behind(self, edge: Edge, start: int) -> bool:
        """Whether the value of an edge is computed by the node ``start`` or a later one, or by a switch there."""
        made = self._raised.producer.get(edge[0])
        return (made is not None and made >= start) or self._at.get(edge, -1) >= start

    def activation_numbers(self, numbers: QuantSource) -> dict[str, Array]:
        """Scale and zero point of each activation's switch, by the name of the constant that holds them."""
        found: dict[str, Array] = {}
        for number, site in enumerate(self._switches):
            if site.weight:
                continue
            params = numbers.params(site)
            real = REALS[self._model.elem_type(site.tensor) or TensorProto.FLOAT]
            values: tuple[Array, ...] = (
                params.scale.astype(real),
                params.zero_point.astype(params.format.dtype),
            )
            names = (self._name(number, tensor.name) for tensor in self._pairs[number].constants)
            found.update(zip(names, values, strict=False))
        return found

    def whole(self, wanted: Iterable[Edge], *, adjustable: bool = False) -> SwitchedModel:
        """The whole model with all switches, and the values of these edges as its outputs.

        Of an ``adjustable`` model single scales and zero points of activations can be fed.
        """
        whole = self.part(0, len(self.nodes) + 1, wanted)
        return self._adjustable(whole) if adjustable else whole

    def head(self, stop: int, tensors: Sequence[str]) -> SwitchedModel:
        """The nodes before ``stop`` without switches, with these tensors as outputs."""
        return self._assembled(range(stop), (), (), {(name, Consumer("", 0)): name for name in tensors})

    def part(self, low: int, high: int, wanted: Iterable[Edge]) -> SwitchedModel:
        """The nodes from ``low`` on, with the switches whose places are below ``high``.

        Outputs of earlier nodes become inputs.
        """
        edges = [edge for edge in self._edges if low <= self._at[edge] < high]
        live = self.live(low) if low else ()
        return self._assembled(range(low, len(self.nodes)), edges, live, self._values_of(edges, wanted))

    def _values_of(self, switched: Iterable[Edge], wanted: Iterable[Edge]) -> dict[Edge, str]:
        """The names of the values of edges, of which some have switches."""
        own = set(switched)
        return {edge: self._value(edge) if edge in own else edge[0] for edge in wanted}

    def live(self, index: int) -> tuple[str, ...]:
        """The activations that are computed before the node of that index, or fed, and read at or after it."""
        made = {name for node in self.nodes[:index] if _computes(node) for name in node.output if name}
        read = {name for node in self.nodes[index:] for name in (*node.input, *names_read_inside(node))}
        return tuple(sorted(made & (read | set(self._model.outputs))))

    def live_sizes(self) -> Floats:
        """The number of elements of `live` at each index, unknown dimensions as 1; infinite if a type is unknown."""
        change = np.zeros(len(self.nodes) + 2)
        last: dict[str, int] = dict.fromkeys(self._model.outputs, len(self.nodes))
        for index, node in enumerate(self.nodes):
            last |= {name: max(index, last.get(name, 0)) for name in (*node.input, *names_read_inside(node))}
        for name, made in self._raised.producer.items():
            if _computes(self.nodes[made]) and last.get(name, -1) > made:
                size = prod(dim or 1 for dim in self._model.shape(name) or ())
                change[made + 1] += size if self._model.elem_type(name) else _NEVER
                change[last[name] + 1] -= size if self._model.elem_type(name) else _NEVER
        sizes = np.cumsum(change)
        if self._model.has_bodies:  # a cut inside a body would cut the body
            sizes[: len(self.nodes)][[bool(scope) for scope in scopes_of(self.nodes)]] = np.inf
        return np.where(sizes >= _NEVER, np.inf, sizes)

    def _assembled(
        self, nodes: range, edges: Sequence[Edge], live: tuple[str, ...], names: Mapping[Edge, str]
    ) -> SwitchedModel:
        numbers = tuple(number for edge in edges for number in self._edges[edge])
        graph_nodes = list(self._switched(nodes, edges))
        if numbers:
            conditions = [self._name(number, "condition") for number in numbers]
            graph_nodes.insert(0, self._taken_apart(self._switch_input, conditions))
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
            count = [len(numbers)]
            info = helper.make_tensor_value_info(self._switch_input, TensorProto.BOOL, count)
            proto.graph.input.append(info)
        wanted = dict.fromkeys((value, edge[0]) for edge, value in names.items())
        proto.graph.output.extend(self._info(value, of=tensor) for value, tensor in wanted)
        if self._model.has_bodies:
            proto = closed(proto)
        switch_input = self._switch_input if numbers else ""
        return SwitchedModel(proto=proto, input=switch_input, numbers=numbers, names=names)

    def _adjustable(self, model: SwitchedModel) -> SwitchedModel:
        """The model with the single numbers of activations of one type in one input, which a Split takes apart."""
        chosen: dict[int, dict[str, TensorProto]] = {}
        for number in model.numbers:
            for tensor in () if self._switches[number].weight else self._constants(number):
                if tensor.data_type in _PACKED and prod(tensor.dims) == 1:
                    chosen.setdefault(tensor.data_type, {})[tensor.name] = tensor
        moved = {name for tensors in chosen.values() for name in tensors}
        proto = copy_model(model.proto, but={"node", "initializer"})
        proto.graph.initializer.extend(t for t in model.proto.graph.initializer if t.name not in moved)
        inputs = {f"{self._prefix}numbers:{kind}": tensors for kind, tensors in chosen.items()}
        for name, tensors in inputs.items():
            values = np.array([numpy_helper.to_array(tensor).item() for tensor in tensors.values()])
            kind = next(iter(tensors.values())).data_type
            typed = values.astype(helper.tensor_dtype_to_np_dtype(kind))
            proto.graph.initializer.append(numpy_helper.from_array(typed, name))
            proto.graph.input.append(helper.make_tensor_value_info(name, kind, [len(tensors)]))
            proto.graph.node.append(self._taken_apart(name, list(tensors)))
        proto.graph.node.extend(model.proto.graph.node)
        return replace(
            model, proto=proto, adjustable={name: tuple(tensors) for name, tensors in inputs.items()}
        )

    def _switched(self, nodes: range, edges: Sequence[Edge]) -> Iterable[onnx.NodeProto]:
        """The nodes in order, each after the switches that precede it, including the constants of earlier nodes."""
        by_place: dict[int, list[Edge]] = {}
        instead: dict[int, dict[int, str]] = {}  # replacements of node inputs
        for edge in edges:
            by_place.setdefault(self._at[edge], []).append(edge)
            for index, number in self._inputs[edge]:
                instead.setdefault(index, {})[number] = self._value(edge)
                if not self._biased.keys().isdisjoint(self._edges[edge]):
                    instead[index][BIAS_INPUT] = self._name(self._edges[edge][0], "bias")
        yield from (node for node in self.nodes[: nodes.start] if not _computes(node))
        for index in nodes:
            own = by_place.pop(index, ())
            yield from map(self._switch, own)
            yield from (node for edge in own for node in self._biases(edge))
            yield _reading(self.nodes[index], instead.get(index, {}))
        for left in by_place.values():  # switches before graph outputs
            yield from map(self._switch, left)

    def _switch(self, edge: Edge) -> onnx.NodeProto:
        """An If for each pair of the edge, each nested in the other branch of the previous one."""
        tensor, numbers = edge[0], self._edges[edge]
        name = self._name(numbers[-1], "float")
        node = helper.make_node("Identity", [tensor], [name], name=name)
        for index, number in reversed(list(enumerate(numbers))):
            otherwise = helper.make_graph([node], "off", [], [self._info(node.output[0], of=tensor)])
            output = self._name(numbers[index - 1], "next") if index else self._value(edge)
            node = self._if_node(number, "if", output, self._branch(number, tensor), otherwise)
        return node

    def _biases(self, edge: Edge) -> Iterable[onnx.NodeProto]:
        """An If for each pair of a weight that changes the bias of its layer; else it is its own, or zeros."""
        numbers = [number for number in self._edges[edge] if number in self._biased]
        value = ""
        for number in reversed(numbers):
            bias = self._biased[number]
            value = value or bias.otherwise
            branches = []
            for nodes, kind in (
                (self._bias_nodes(number), "bias:then"),
                ([self._identity(value, self._name(number, "bias:else"))], "bias:else"),
            ):
                out = self._name(number, kind)
                branches.append(helper.make_graph(nodes, out, [], [self._info(out, of=edge[0])]))
            value = self._name(number, "bias" if number == self._edges[edge][0] else "bias:value")
            yield self._if_node(number, "bias:if", value, *branches)
        if numbers and numbers[0] != self._edges[edge][0]:
            yield self._identity(value, self._name(self._edges[edge][0], "bias"))

    def _bias_nodes(self, number: int) -> list[onnx.NodeProto]:
        """The nodes that compute the bias if the pair of its layer's weight is on: corrected, rounded, or both."""
        bias, out = self._biased[number], self._name(number, "bias:then")
        if bias.data is None:
            return [self._identity(bias.value, out)]
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
        site, pair = self._switches[number], self._pairs[number]
        data = self._scaled_input(site) if site.weight else None
        if pair.bias is not None:
            on, off = self._name(number, "bias:on"), self._name(number, "bias:off")
            return _Bias(value=on, otherwise=off if pair.bias.is_added else pair.bias.value.name, data=data)
        own = "" if data is None else self._model.by_name[site.consumers[0].node].input_at(BIAS_INPUT)
        return _Bias(value=own, otherwise=own, data=data) if own in self._model.constants else None

    def _scaled_input(self, site: Site) -> int | None:
        """The pair, with one scale, on the data of the layer that reads a weight, if its bias is rounded with it."""
        end = site.consumers[0]
        node = None if end.is_output else self._model.by_name[end.node]
        if node is None or node.op_type not in self._rounds_biases or number_format(site.format).block:
            return None
        numbers = self._edges.get((node.inputs[0], Consumer(node.name, 0)), ())
        scaled = (n for n in numbers if self._pairs[n].constants and self._switches[n].axis is None)
        return next(scaled, None)

    def _identity(self, source: str, name: str) -> onnx.NodeProto:
        return helper.make_node("Identity", [source], [name], name=name)

    def _if_node(
        self, number: int, kind: str, output: str, then: onnx.GraphProto, otherwise: onnx.GraphProto
    ) -> onnx.NodeProto:
        condition, name = self._name(number, "condition"), self._name(number, kind)
        return helper.make_node(
            "If", [condition], [output], name=name, then_branch=then, else_branch=otherwise
        )

    def _branch(self, number: int, tensor: str) -> onnx.GraphProto:
        pair = self._pairs[number]
        nodes = []
        for made in pair.nodes:
            node = copied(made)
            node.name = self._name(number, made.name)
            for names in (node.input, node.output):
                refill(names, [tensor if name == _SOURCE else self._name(number, name) for name in names])
            nodes.append(node)
        output = self._info(self._name(number, pair.output), of=tensor)
        return helper.make_graph(nodes, "on", [], [output])

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

    def _taken_apart(self, tensor: str, parts: Sequence[str]) -> onnx.NodeProto:
        """A Split of a tensor into its elements."""
        split = helper.make_node("Split", [tensor], parts, axis=0)
        if opset_of(self._base) >= _SPLIT_TAKES_NUMBER:
            split.attribute.append(helper.make_attribute("num_outputs", len(parts)))
        return split

    def _places(self, edge: Edge) -> list[_Input]:
        """The inputs of the consumer after the opset was raised; for a graph output, a place after all nodes.

        If raising the opset replaced the node, these are all inputs of added nodes that read the tensor.
        """
        tensor, end = edge
        if end.is_output:
            return [(len(self.nodes), 0)]
        return self._raised.of(tensor, end, [end], "rehearsed", "build the placement and measure it")

    def _value(self, edge: Edge) -> str:
        return self._name(self._edges[edge][0], "value")

    def _name(self, number: int, name: str) -> str:
        return f"{self._prefix}{number}:{name}"

    def _info(self, name: str, of: str | None = None) -> onnx.ValueInfoProto:
        known = self._model.elem_type(of or name)
        if known is None:
            return onnx.ValueInfoProto(name=name)
        return helper.make_tensor_value_info(name, known, None)


def _reading(node: onnx.NodeProto, instead: Mapping[int, str]) -> onnx.NodeProto:
    """The node with these tensors at these inputs."""
    if not instead:
        return node
    changed = copied(node)
    for index, name in sorted(instead.items()):
        if index == len(changed.input):
            changed.input.append(name)
        else:
            changed.input[index] = name
    return changed


def _computes(node: onnx.NodeProto) -> bool:
    return node.op_type != "Constant"


def _names(proto: onnx.ModelProto) -> Collection[str]:
    graph = proto.graph
    named = {item.name for field in (graph.input, graph.output, graph.initializer) for item in field}
    inside = {name for node in graph.node for name in names_read_inside(node)}
    return named | inside | {name for node in graph.node for name in (*node.input, *node.output, node.name)}
