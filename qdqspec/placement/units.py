"""Units: what gets one label. An operator, what its kernel takes in, and what is quantized under each label.

May import floors 0 to 2. It asks the backend's capabilities what fuses and knows nothing of measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import NEVER, data_inputs, is_default, is_float, made_of_shapes, reads_data
from qdqspec.placement.ops import bias_input, channel_axis, summed_axis, weight_input
from qdqspec.quantize.formats import BIAS_FORMAT, number_format
from qdqspec.types import Consumer, Label, QuantizeRules, Site

_NEEDS_WEIGHT = frozenset({"Conv", "ConvTranspose", "Gemm"})  # no integer kernel takes a computed one


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator with what fuses into it.

    ``edges`` are its activation inputs, ``constants`` its weight and constant operands, ``biases`` what must be
    int32 under ``in-only``, ``outputs`` the tensors that get a pair under ``in+out``, and ``out_edges`` single
    edges that do. ``labels`` begins with ``fp``.
    """

    id: str
    op_type: str
    nodes: tuple[str, ...]
    labels: tuple[Label, ...]
    edges: tuple[tuple[str, Consumer], ...]
    constants: tuple[Site, ...]
    biases: tuple[Site, ...]
    outputs: tuple[str, ...]
    out_edges: tuple[tuple[str, Consumer], ...] = ()

    @property
    def full(self) -> Label:
        """The label that quantizes most of it."""
        return "in+out" if "in+out" in self.labels else self.labels[-1]


def with_results(
    unit: Unit, outputs: tuple[str, ...], out_edges: tuple[tuple[str, Consumer], ...] = ()
) -> Unit:
    """The unit with other results. Without any it cannot be ``in+out``."""
    keeps = bool(outputs or out_edges)
    labels = tuple(label for label in unit.labels if label != "in+out" or keeps)
    return replace(unit, outputs=outputs, out_edges=out_edges, labels=labels)


class UnitFinder:
    """Finds the units of a model for one backend."""

    def __init__(
        self, model: Model, capabilities: Capabilities, rules: QuantizeRules, activation: str, weight: str
    ) -> None:
        self._model = model
        self._capabilities = capabilities
        self._per_channel = rules.weights == "per-channel"
        self._activation = activation
        self._weight = weight
        self._block = number_format(weight).block
        self._of_shapes = made_of_shapes(model)

    def find(self, allowed: Collection[str] | None) -> Iterator[Unit]:
        """The units in graph order, of ``allowed`` nodes (all where it is ``None``)."""
        taken: set[str] = set()
        for node in self._model.nodes:
            if node.name in taken or (allowed is not None and node.name not in allowed):
                continue
            unit = self._unit(node)
            if unit is not None:
                taken.update(unit.nodes)
                yield unit

    def _unit(self, node: Node) -> Unit | None:
        if self._block:
            return self._blocked(node)
        operands = self._operands(node)
        if operands is None or not self._of_shapes.isdisjoint(node.outputs):
            return None
        chain = self._chain(node)
        outputs = tuple(t for t in chain[-1].outputs if self._can_quantize(t))
        biases = self._biases(chain)
        labels = self._labels(node, bool(outputs), biases)
        if not labels:
            return None
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=tuple(n.name for n in chain),
            labels=("fp", *labels),
            edges=operands[0],
            constants=operands[1],
            biases=biases or (),
            outputs=outputs if "in+out" in labels else (),
        )

    def _blocked(self, node: Node) -> Unit | None:
        """A unit of which the weight is stored in blocks and nothing else is quantized."""
        index = weight_input(self._model, node) if is_default(node) else None
        if index is None or not is_float(self._model, node.inputs[index]):
            return None
        axis = summed_axis(self._model, node, index)
        whole = axis is not None and self._model.constants[node.inputs[index]].dims[axis] % self._block == 0
        if not whole or axis not in self._capabilities.blocked_axes.get(node.op_type, ()):
            return None
        site = replace(self._constant(node, index, is_weight=True), axis=axis)
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=(node.name,),
            labels=("fp", "in-only"),
            edges=(),
            constants=(site,),
            biases=(),
            outputs=(),
        )

    def _labels(self, node: Node, has_outputs: bool, biases: tuple[Site, ...] | None) -> tuple[Label, ...]:
        possible = {"in+out": has_outputs, "in-only": biases is not None}
        return tuple(label for label in self._offered(node) if possible[label])

    def _offered(self, node: Node) -> tuple[Label, ...]:
        too_old = self._model.opset < self._capabilities.since_opset.get(node.op_type, 0)
        if too_old or node.op_type in NEVER or not is_default(node):
            return ()
        return self._capabilities.labels.get(node.op_type, ())

    def _operands(self, node: Node) -> tuple[tuple[tuple[str, Consumer], ...], tuple[Site, ...]] | None:
        """Activation edges and constant sites of a node; ``None`` where one of them cannot be quantized."""
        weight = weight_input(self._model, node)
        if not self._offered(node) or (weight is None and node.op_type in _NEEDS_WEIGHT):
            return None
        edges, constants = [], []
        for index in data_inputs(node):
            tensor, end = node.inputs[index], Consumer(node.name, index)
            if not is_float(self._model, tensor):
                return None
            if tensor in self._model.constants:
                constants.append(self._constant(node, index, is_weight=index == weight))
            else:
                edges.append((tensor, end))
        return (tuple(edges), tuple(constants)) if edges else None

    def _constant(self, node: Node, index: int, *, is_weight: bool) -> Site:
        return Site(
            tensor=node.inputs[index],
            consumers=(Consumer(node.name, index),),
            format=self._weight if is_weight else self._activation,
            axis=channel_axis(self._model, node, index) if is_weight and self._per_channel else None,
            weight=True,
        )

    def _biases(self, chain: list[Node]) -> tuple[Site, ...] | None:
        """The bias that must be int32 for a float output; ``None`` where there is one that cannot be."""
        head = chain[0]
        if head.op_type not in self._capabilities.integer_bias:
            return ()
        owner = head if head.op_type == "Gemm" else self._adder(chain)
        if owner is None or (owner is head and (len(head.inputs) < 3 or not head.inputs[2])):
            return ()
        index = bias_input(self._model, owner, self._channels(head))
        if index is None:
            return None
        site = Site(
            tensor=owner.inputs[index],
            consumers=(Consumer(owner.name, index),),
            format=BIAS_FORMAT,
            axis=0 if self._per_channel else None,
            weight=True,
        )
        return (site,)

    def _adder(self, chain: list[Node]) -> Node | None:
        return next((node for node in chain[1:] if node.op_type == "Add"), None)

    def _channels(self, head: Node) -> int:
        """Output channels of a Gemm or MatMul with a constant weight; 0 without one."""
        weight = weight_input(self._model, head)
        axis = channel_axis(self._model, head, weight) if weight is not None else None
        return 0 if weight is None or axis is None else self._model.constants[head.inputs[weight]].dims[axis]

    def _chain(self, node: Node) -> list[Node]:
        """The node, the bias after a MatMul, and the activation functions that its kernel takes in."""
        chain = [node]
        while (follower := self._sole_reader(chain[-1])) is not None:
            is_bias = len(chain) == 1 and self._is_bias(node, follower)
            if not is_bias and not self._is_absorbed(chain[-1], follower):
                break
            chain.append(follower)
        return chain

    def _is_bias(self, head: Node, follower: Node) -> bool:
        if head.op_type != "MatMul" or head.op_type not in self._capabilities.integer_bias:
            return False
        channels = self._channels(head)
        return (
            follower.op_type == "Add"
            and channels > 0
            and bias_input(self._model, follower, channels) is not None
        )

    def _is_absorbed(self, last: Node, follower: Node) -> bool:
        bounds = [tensor for tensor in follower.inputs[1:] if tensor]
        return (
            follower.op_type in self._capabilities.absorbs
            and follower.inputs[0] == last.outputs[0]
            and all(tensor in self._model.constants for tensor in bounds)
        )

    def _sole_reader(self, node: Node) -> Node | None:
        """The one node that reads the one output, where nobody else can see it."""
        if len(node.outputs) != 1:
            return None
        ends = self._model.consumers.get(node.outputs[0], ())
        seen_outside = node.outputs[0] in self._model.outputs or node.outputs[0] in self._model.subgraph_reads
        return self._model.by_name[ends[0].node] if len(ends) == 1 and not seen_outside else None

    def _can_quantize(self, tensor: str) -> bool:
        """Whether a tensor can be made integer where it is made: all who see it must be able to take that."""
        seen_outside = tensor in self._model.outputs or tensor in self._model.subgraph_reads
        readers = self._model.consumers.get(tensor, ()) if tensor else ()
        read = bool(readers) and all(reads_data(self._model, end) for end in readers)
        return read and not seen_outside and is_float(self._model, tensor)
