"""Taking Q/DQ out of a model, whoever put it in: the inverse of insertion.

May import floors 0 to 2, onnx, and this room. Pairs are recognized by structure, never by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.opset import opset_of, raise_opset
from qdqspec.graph.protos import all_graphs, copy_model, graphs_inside, map_tensors, refill
from qdqspec.placement.insert import RAISED_FROM, raised
from qdqspec.placement.restore import FloatWeights, is_constant, within_reach
from qdqspec.placement.revive import Revival

_DOMAINS = ("", "ai.onnx", "com.microsoft")


@dataclass(frozen=True, slots=True)
class Stripped:
    """A model without Q/DQ, and what a reader should know: what was left alone, what could not be restored."""

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()


def strip_qdq(model: Model, reference: Model | None = None) -> Stripped:
    """The float model behind a model with Q/DQ pairs.

    Float weights behind Q and DQ come back bit for bit; integer ones dequantized as float, or from the
    ``reference`` (the model before quantization) bit for bit. What `insert_qdq` made is undone byte for
    byte; only a raised opset stays raised. Where the result has just the nodes, weights and interface of the
    reference (at the model's opset), the reference itself is returned: tools reorder, and raise the opset.
    Pairs that cannot be taken out are left and noted. External data refers to the folder of ``model``.
    """
    expected = None if reference is None else _at_opset_of(model, reference)
    work = _Strip(model, FloatWeights(model, expected), Revival(model, expected))
    work.find()
    proto = work.build()
    notes = [*work.notes()]
    if reference is not None and expected is not None:
        if _same_parts(proto, _reachable(expected, model)):
            return Stripped(_reachable(reference, model), (*notes, "equal to the reference"))
        notes.extend(_missing(proto, reference))
    if (before := _raised_from(model.proto)) is not None:
        notes.append(f"stays at opset {opset_of(model.proto)}, to which it was raised (was {before})")
    return Stripped(proto, tuple(notes))


@dataclass(slots=True)
class _Strip:
    """One stripping under way: first find what goes, then build the rest."""

    model: Model
    weights: FloatWeights
    revival: Revival
    alias: dict[str, str] = field(default_factory=dict)  # tensor: what stands for it afterwards
    gone: set[int] = field(default_factory=set)  # nodes, by index
    floats: dict[str, TensorProto] = field(default_factory=dict)  # restored weights by name
    place: dict[str, str] = field(default_factory=dict)  # integer weight: the restored one in its place
    dropped: set[str] = field(default_factory=set)  # initializers
    left: dict[str, list[str]] = field(default_factory=dict)  # reason: nodes left alone

    def find(self) -> None:
        """Decide on every node."""
        for node in self.model.nodes:
            if _is(node, "DequantizeLinear"):
                self._find_dequantize(node)
        for node in self.model.nodes:
            if _is(node, "QuantizeLinear"):
                self._find_quantize(node)
        self._sweep()

    def _find_dequantize(self, node: Node) -> None:
        source = node.inputs[0]
        producer = self.model.producer.get(source)
        if producer is not None and _is(producer, "QuantizeLinear"):
            reason = self._take_pair(producer, node)
        elif source not in self.model.constants:
            maker = "a graph input" if producer is None else producer.op_type
            reason = f"reads what no QuantizeLinear made, but {maker}"
        elif not is_constant(self.model, node.inputs):
            reason = "has a scale or zero point that is computed"
        else:
            reason = self._take_weight(node)
        if reason:
            self.left.setdefault(reason, []).append(node.name)
        else:
            self.gone.add(node.index)

    def _take_pair(self, quantize: Node, dequantize: Node) -> str:
        """Let what comes before the pair stand for what comes after it; a reason where that cannot be."""
        before, after = quantize.inputs[0], dequantize.outputs[0]
        types = {self.model.elem_type(before), self.model.elem_type(after)} - {None}
        if len(types) > 1:
            return "changes the element type"
        if self.revival.take(quantize, dequantize):
            return ""
        before = self._now(before)
        if after not in self.model.outputs:
            self.alias[after] = before
        elif before in self.model.producer and before not in self.model.outputs:
            self.alias[before] = after  # a graph output keeps its name: the producer makes it now
        else:
            return "makes a graph output out of an input or another output"
        return ""

    def _take_weight(self, node: Node) -> str:
        name = self.weights.name(node)
        if name != node.outputs[0]:
            self.alias[node.outputs[0]] = name
        if name in self.floats or (name in self.model.constants and name != node.outputs[0]):
            return ""
        self.floats[name] = self.weights.tensor(node, name)
        self.place.setdefault(node.inputs[0], name)
        return ""

    def _find_quantize(self, node: Node) -> None:
        ends = self.model.consumers.get(node.outputs[0], ())
        if all(self.model.by_name[end.node].index in self.gone for end in ends) and not self._is_seen(
            node.outputs[0]
        ):
            self.gone.add(node.index)
        else:
            self.left.setdefault("has an integer output that others read", []).append(node.name)

    def _is_seen(self, tensor: str) -> bool:
        return tensor in self.model.outputs or tensor in self.model.subgraph_reads

    def _sweep(self) -> None:
        """Drop the constants, and what computed them, that only the nodes gone had read."""
        work = [name for index in sorted(self.gone) for name in self._own_inputs(self.model.nodes[index])]
        while work:
            name = work.pop()
            if not name or name in self.dropped or not self._is_dead(name):
                continue
            producer = self.model.producer.get(name)
            if producer is None:
                self.dropped.update({name} & self.model.initializers.keys())
            elif name in self.place:
                self.dropped.add(name)
            elif all(self._is_dead(output) for output in producer.outputs if output):
                self.gone.add(producer.index)
                work.extend(producer.inputs)

    def _own_inputs(self, node: Node) -> tuple[str, ...]:
        """The inputs of a Q or DQ gone that are not the data passing through it."""
        stored = _is(node, "DequantizeLinear") and node.inputs[0] in self.model.constants
        return node.inputs if stored else node.inputs[1:]

    def _is_dead(self, tensor: str) -> bool:
        ends = self.model.consumers.get(tensor, ())
        return not self._is_seen(tensor) and all(self.model.by_name[e.node].index in self.gone for e in ends)

    def _now(self, tensor: str) -> str:
        while tensor in self.alias:
            tensor = self.alias[tensor]
        return tensor

    def build(self) -> onnx.ModelProto:
        """The model as it is without what was found."""
        proto = copy_model(self.model.proto, but={"node", "initializer", "value_info", "input"})
        graph = proto.graph
        graph.node.extend(self._nodes())
        graph.initializer.extend(self._initializers())
        graph.input.extend(self._inputs())
        vanished = {out for index in self.gone for out in self.model.nodes[index].outputs}
        vanished |= self.dropped | self.alias.keys()
        vanished -= self.floats.keys() | {self.model.nodes[i].outputs[0] for i in self.revival.relus}
        graph.value_info.extend(v for v in self.model.proto.graph.value_info if v.name not in vanished)
        return proto

    def _nodes(self) -> Iterator[onnx.NodeProto]:
        for node in self.model.nodes:
            if node.index in self.revival.relus:
                yield self.revival.relu(node, self._now(self.revival.relus[node.index]))
            elif node.index in self.revival.exact:
                revived = self.revival.exact[node.index]
                before = onnx.NodeProto()
                before.CopyFrom(self._node(node))
                refill(
                    before.output,
                    [revived.inputs[0] if o == revived.outputs[0] else o for o in before.output],
                )
                yield from (before, revived.proto)
            elif node.index not in self.gone:
                yield self._node(node)

    def _node(self, node: Node) -> onnx.NodeProto:
        restored = self._restored_constant(node)
        touched = any(name in self.alias for name in (*node.inputs, *node.outputs, *node.body_reads))
        if restored is None and not touched:
            return node.proto
        changed = onnx.NodeProto()
        changed.CopyFrom(node.proto)
        self._rename(changed)
        if restored is not None:
            changed.output[0] = restored
            next(a for a in changed.attribute if a.name == "value").t.CopyFrom(self.floats[restored])
        return changed

    def _restored_constant(self, node: Node) -> str | None:
        """The weight to be restored in this Constant node's place."""
        if node.op_type != "Constant" or node.outputs[0] not in self.dropped:
            return None
        return self.place.get(node.outputs[0])

    def _rename(self, node: onnx.NodeProto) -> None:
        refill(node.input, [self._now(name) for name in node.input])
        refill(node.output, [self._now(name) for name in node.output])
        for body in graphs_inside(node):
            for graph in all_graphs(body):
                for inner in graph.node:
                    refill(inner.input, [self._now(name) for name in inner.input])
                for output in graph.output:
                    output.name = self._now(output.name)

    def _initializers(self) -> Iterator[TensorProto]:
        placed = {self.place[name] for name in self.dropped if name in self.place}
        for tensor in self.model.proto.graph.initializer:
            if tensor.name not in self.dropped:
                yield tensor
            elif tensor.name in self.place:
                yield self._float(self.place[tensor.name])
        yield from (self._float(name) for name in self.floats if name not in placed)
        if self.weights.reference is not None:
            constants = self.weights.reference.constants
            yield from (constants[name] for name in sorted(self.revival.constants()))

    def _float(self, name: str) -> TensorProto:
        """The restored weight as an initializer; the value of a Constant node may have any name inside."""
        tensor = self.floats[name]
        if tensor.name == name:
            return tensor
        named = TensorProto()
        named.CopyFrom(tensor)
        named.name = name
        return named

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        """The graph inputs, with those that a restored weight was at the same time."""
        inputs = [i for i in self.model.proto.graph.input if i.name not in self.dropped]
        reference = self.weights.reference
        if reference is None or not any(i.name in self.floats for i in reference.proto.graph.input):
            return inputs
        names = {i.name for i in inputs} | self.floats.keys()
        return [i for i in reference.proto.graph.input if i.name in names]

    def notes(self) -> Iterator[str]:
        """What a reader should know."""
        for reason, nodes in self.left.items():
            yield f"left alone, {_listed(nodes)}: {reason}"
        for graph in self._bodies_with_pairs():
            yield f"left alone, Q/DQ in the body or function '{graph}': only the main graph is stripped"
        if self.weights.restored:
            yield f"taken from the reference, {_listed(self.weights.restored)}"
        if self.weights.dequantized:
            known = self.weights.reference is not None
            cure = (
                "the reference has no such weight" if known else "only the original as reference restores it"
            )
            yield f"dequantized, not as before quantization, {_listed(self.weights.dequantized)}: {cure}"
        if self.revival.exact:
            nodes = [node.name for node in self.revival.exact.values()]
            yield f"removed by the quantizing tool and taken from the reference, {_listed(nodes)}"
        if self.revival.relus:
            yield (
                f"a Relu stands where a zero point had cut off negative values, "
                f"{_listed(self.revival.relus.values())}: the quantizing tool may have removed one, or a Clip"
            )

    def _bodies_with_pairs(self) -> Iterator[str]:
        graphs = [g for node in self.model.nodes for b in graphs_inside(node.proto) for g in all_graphs(b)]
        for holder in (*graphs, *self.model.proto.functions):
            if any(node.op_type in QDQ_OPS for node in holder.node):
                yield holder.name


def _is(node: Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in _DOMAINS


def _listed(names: Iterable[str], most: int = 3) -> str:
    """``4: 'a', 'b', 'c' and 1 more``."""
    names = list(names)
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return f"{len(names)}: {shown}" + (f" and {len(names) - most} more" if len(names) > most else "")


def _raised_from(proto: onnx.ModelProto) -> str | None:
    return next((p.value for p in proto.metadata_props if p.key == RAISED_FROM), None)


def _at_opset_of(model: Model, reference: Model) -> Model:
    """The reference as it looks after raising its opset to the model's, as whoever quantized it did."""
    if _raised_from(model.proto) is not None:
        return Model(raised(reference.proto, opset_of(model.proto)), path=reference.path)
    if opset_of(model.proto) > opset_of(reference.proto):
        return Model(raise_opset(reference.proto, opset_of(model.proto)), path=reference.path)
    return reference


def _same_parts(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """Whether two models have the same nodes and weights, in whatever order, and the same interface."""
    left, right = one.graph, other.graph
    return (
        left.input == right.input
        and left.output == right.output
        and one.functions == other.functions
        and {t.name: t for t in left.initializer} == {t.name: t for t in right.initializer}
        and sorted(map(_bytes, left.node)) == sorted(map(_bytes, right.node))
    )


def _bytes(node: onnx.NodeProto) -> bytes:
    return bytes(node.SerializeToString(deterministic=True))


def _reachable(owner: Model, reader: Model) -> onnx.ModelProto:
    return map_tensors(owner.proto, lambda tensor: within_reach(tensor, owner, reader))


def _missing(proto: onnx.ModelProto, reference: Model) -> Iterator[str]:
    """What tells the result from the reference, in nodes."""
    here = Model(proto).by_name
    lost = [n.name for n in reference.nodes if n.name not in here and n.op_type not in QDQ_OPS]
    if lost:
        yield f"not like the reference, which has more nodes, {_listed(lost)}: the quantizing tool removed them"
