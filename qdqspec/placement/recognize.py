"""Recognizes the Q/DQ pairs of a model, made by any tool, for stripping, import and comparison.

Pairs are recognized by structure, never by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import TensorProto

from qdqspec.graph.dynamic_kernels import QUANTIZE
from qdqspec.graph.dynamic_pairs import with_pairs
from qdqspec.graph.model import Model, Node
from qdqspec.graph.trt import DOMAIN, PAIR_OPS
from qdqspec.placement.restore import FloatWeights, is_constant, makes_scale
from qdqspec.placement.revive import Revival

_DOMAINS = ("", "ai.onnx", "com.microsoft")


def recognize(
    model: Model, reference: Model | None = None, *, activations: Model | None = None
) -> Recognition:
    """Examine each node of a model; ``reference`` is the model before quantization, at the same opset.

    ``activations`` replaces it if only a removed Relu or Clip has to be restored.
    """
    model = with_pairs(model, reference)
    found = Recognition(model, FloatWeights(model, reference), Revival(model, activations or reference))
    found.find()
    return found


@dataclass(slots=True)
class Recognition:
    """The Q/DQ of a model, and its replacement in the model without.

    ``gone`` are the nodes to remove, by index; ``floats`` the DequantizeLinear nodes whose weights are
    restored, by name; ``place`` the name of such a weight by the integers it replaces; ``left`` the nodes
    that cannot be removed, by reason.
    """

    model: Model
    weights: FloatWeights
    revival: Revival
    alias: dict[str, str] = field(default_factory=dict)  # tensor: its replacement
    gone: set[int] = field(default_factory=set)
    floats: dict[str, Node] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)  # initializers
    left: dict[str, list[str]] = field(default_factory=dict)
    _stored: dict[str, list[str]] = field(default_factory=dict)  # integer forms of each weight

    def find(self) -> None:
        """Classify each node."""
        for node in self.model.nodes:
            if is_op(node, "DequantizeLinear") and not makes_scale(self.model, node.outputs[0]):
                self._find_dequantize(node)
        for node in self.model.nodes:
            if is_op(node, "QuantizeLinear"):
                self._find_quantize(node)
        # The place of each weight. Of several integer forms, insertion puts one in place and others
        # at the end.
        order = {name: index for index, name in enumerate(self.model.initializers)}
        for name, forms in self._stored.items():
            self.place.setdefault(min(forms, key=lambda form: order.get(form, -1)), name)
        self._sweep()

    def _find_dequantize(self, node: Node) -> None:
        source = node.inputs[0]
        producer = self.model.producer.get(source)
        if producer is not None and is_op(producer, "QuantizeLinear") and source == producer.outputs[0]:
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
        """Replace the tensor after the pair by that before it; return the reason if that is impossible."""
        before, after = quantize.inputs[0], dequantize.outputs[0]
        types = {self.model.elem_type(before), self.model.elem_type(after)} - {None}
        if len(types) > 1:
            return "changes the element type"
        if self.revival.take(quantize, dequantize):
            return ""
        before = self.now(before)
        if self._leaves_body(before, after):
            return "makes an output of a body out of a tensor of another graph"
        if after not in self.model.outputs:
            self.alias[after] = before
        elif before in self.model.producer and before not in self.model.outputs:
            self.alias[before] = after  # a graph output keeps its name: the producer makes it now
        else:
            return "makes a graph output out of an input or another output"
        return ""

    def _leaves_body(self, before: str, after: str) -> bool:
        """Whether a tensor is an output of a body, and its replacement is of another graph."""
        if not self.model.has_bodies:
            return False
        readers = [self.model.by_name[end.node] for end in self.model.consumers.get(after, ())]
        maker = self.model.producer.get(before)
        scope = "" if maker is None else maker.scope
        return any(reader.is_marker and reader.scope != scope for reader in readers)

    def _take_weight(self, node: Node) -> str:
        name = self.weights.name(node)
        if name != node.outputs[0]:
            self.alias[node.outputs[0]] = name
        if name in self.model.constants and name != node.outputs[0]:
            return ""
        if name not in self.floats:
            self.floats[name] = node
            self.weights.note(node, name)
        self._stored.setdefault(name, []).append(node.inputs[0])
        return ""

    def _find_quantize(self, node: Node) -> None:
        ends = [end for output in node.outputs for end in self.model.consumers.get(output, ())]
        if all(self._is_gone(self.model.by_name[end.node]) for end in ends) and not any(
            map(self._is_seen, node.outputs)
        ):
            self.gone.add(node.index)
        else:
            self.left.setdefault("has an integer output that others read", []).append(node.name)

    def _is_gone(self, node: Node) -> bool:
        """Whether a node is removed, or makes only scales of removed nodes."""
        if node.index in self.gone or not makes_scale(self.model, node.outputs[0]):
            return node.index in self.gone
        return all(
            self.model.by_name[end.node].index in self.gone for end in self.model.consumers[node.outputs[0]]
        )

    def _is_seen(self, tensor: str) -> bool:
        return tensor in self.model.outputs or tensor in self.model.subgraph_reads

    def _sweep(self) -> None:
        """Remove the constants, and the nodes that computed them, that only removed nodes had read."""
        work = [name for index in sorted(self.gone) for name in self._own_inputs(self.model.nodes[index])]
        while work:
            name = work.pop()
            if not name or name in self.dropped or not self._is_dead(name):
                continue
            producer = self.model.producer.get(name)
            if producer is not None and producer.index in self.gone:
                continue  # a pair's own constants are always removed
            if producer is None:
                self.dropped.update({name} & self.model.initializers.keys())
            elif name in self.place:
                self.dropped.add(name)
            elif all(self._is_dead(output) for output in producer.outputs if output):
                self.gone.add(producer.index)
                work.extend(producer.inputs)

    def _own_inputs(self, node: Node) -> tuple[str, ...]:
        """The inputs of a removed Q or DQ except the data passing through it."""
        stored = is_op(node, "DequantizeLinear") and node.inputs[0] in self.model.constants
        return node.inputs if stored else node.inputs[1:]

    def _is_dead(self, tensor: str) -> bool:
        ends = self.model.consumers.get(tensor, ())
        return not self._is_seen(tensor) and all(self.model.by_name[e.node].index in self.gone for e in ends)

    def float_weight(self, name: str) -> TensorProto:
        """One of ``floats``, computed on demand: all of them are as large as the model before quantization."""
        return self.weights.tensor(self.floats[name], name)

    def now(self, tensor: str) -> str:
        """The name of a tensor in the model without Q/DQ."""
        while tensor in self.alias:
            tensor = self.alias[tensor]
        return tensor


def is_op(node: Node, op_type: str) -> bool:
    """Whether a node is a QuantizeLinear or DequantizeLinear, or another operator with that role in a pair."""
    if node.domain == DOMAIN:
        return PAIR_OPS.get(node.op_type, node.op_type) == op_type
    if node.op_type == QUANTIZE:
        return op_type == "QuantizeLinear" and node.domain in _DOMAINS
    return node.op_type == op_type and node.domain in _DOMAINS


def is_qdq(node: Node) -> bool:
    """Whether a node is either of the two."""
    return is_op(node, "QuantizeLinear") or is_op(node, "DequantizeLinear")
