"""Restores Relu and Clip that a quantizing tool removed because a zero point cuts off the same values.

ONNX Runtime's quantizer removes them with unsigned activations: without its pairs such a model computes
something else. Without the original this is a guess: a zero point at the end of the range may also come from
calibration. No Relu is inserted if the graph shows that none can have been removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

from qdqspec.graph.dynamic_kernels import CARRIED
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import COPY_OPS, is_default
from qdqspec.placement.restore import is_dynamic

# A pair after one of these that cuts off negative values acts as a Relu.
_SIGNED_OUTPUT = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "BatchNormalization", "LayerNormalization"}
)


@dataclass(slots=True)
class Revival:
    """Finds the pairs that replace an activation function, and the nodes to restore.

    ``exact`` are the reference's own nodes, by the index of the node they follow; ``relus`` are
    DequantizeLinear nodes, by index, that become a Relu, with the tensor it reads.
    """

    model: Model
    reference: Model | None
    exact: dict[int, Node] = field(default_factory=dict)
    relus: dict[int, str] = field(default_factory=dict)
    _signs: Signs = field(init=False)

    def __post_init__(self) -> None:
        self._signs = Signs(self.model)

    def take(self, quantize: Node, dequantize: Node) -> bool:
        """Record the pair if a Relu must replace it. True if the pair cannot simply be removed."""
        tensor = quantize.inputs[0]
        producer = self.model.producer.get(tensor)
        if producer is None or is_dynamic(quantize) or not self._cuts_at_zero(producer, quantize):
            return False
        after = dequantize.outputs[0]
        # A graph output keeps its name through a pair; other tensors get the name of the tensor before it.
        known = after if after in self.model.outputs else tensor
        original = self.reference.producer.get(known) if self.reference else None
        if original is None:
            if self._signs.never_negative(tensor) or self._signs.cut_at_zero(tensor):
                return False
            self.relus[dequantize.index] = tensor
            return True
        if original.op_type in ("Relu", "Clip") and self._fits(original):
            self.exact[producer.index] = original
        return False

    def constants(self) -> set[str]:
        """Constants that the restored nodes read and the model lacks: bounds of a Clip."""
        read = {name for node in self.exact.values() for name in node.inputs[1:] if name}
        return read - self.model.constants.keys()

    def relu(self, dequantize: Node, tensor: str) -> onnx.NodeProto:
        """The Relu in place of a pair."""
        return onnx.helper.make_node("Relu", [tensor], list(dequantize.outputs), f"{dequantize.name}_Relu")

    def _fits(self, original: Node) -> bool:
        known = self.reference.constants if self.reference else {}
        free = original.inputs[0] not in self.model.producer and original.inputs[0] not in self.model.inputs
        return free and all(name in known for name in original.inputs[1:] if name)

    def _cuts_at_zero(self, producer: Node, quantize: Node) -> bool:
        if producer.op_type not in _SIGNED_OUTPUT or any(
            p.key == CARRIED for p in quantize.proto.metadata_props
        ):
            return False
        return starts_at_zero(self.model, quantize)


# Proves from the graph which tensors have no negative values.
# Used where a Q/DQ pair may replace a Relu that a quantizing tool removed: on a tensor that is never
# negative, or before a Relu, nothing was removed.

_DEPTH = 64  # depth limit of the search along one path; beyond it the result is unknown

# Their results are never negative, for any operands.
_NEVER_NEGATIVE = frozenset(
    {
        "Abs", "Exp", "HardSigmoid", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Softmax",
        "Softplus", "Sqrt",
    }
)  # fmt: skip

# Their results are never negative if no operand is: they copy, pool, add or multiply values.
_KEEPS_SIGN = COPY_OPS | {
    "Add", "AveragePool", "Concat", "Conv", "ConvTranspose", "Div", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
    "MatMul", "Max", "MaxPool", "Mul", "Pow", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Sum",
}  # fmt: skip
_REDUCES = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
# a Relu after them cuts off the same values
_PASSES = COPY_OPS | {"MaxPool", "QuantizeLinear", "DequantizeLinear"}


@dataclass(slots=True)
class Signs:
    """Known signs of a model's tensors; each is computed once."""

    model: Model
    _known: dict[str, bool] = field(default_factory=dict)

    def never_negative(self, tensor: str, depth: int = _DEPTH) -> bool:
        """Whether the graph proves that no value of a tensor is below zero. False if unknown."""
        if tensor not in self._known:
            self._known[tensor] = self._find(tensor, depth)
        return self._known[tensor]

    def cut_at_zero(self, tensor: str) -> bool:
        """Whether a Relu, or a Clip at zero, reads a tensor: directly, or after nodes that copy or pool it."""
        waiting, seen = [tensor], {tensor}
        while waiting:
            for end in self.model.consumers.get(waiting.pop(), ()):
                node = self.model.by_name[end.node]
                if end.input or not is_default(node):
                    continue
                if node.op_type == "Relu" or self._clips_at_zero(node):
                    return True
                if node.op_type in _PASSES:
                    waiting.extend({*node.outputs} - seen)
                    seen.update(node.outputs)
        return False

    def _find(self, tensor: str, depth: int) -> bool:
        if tensor in self.model.constants:
            values = self.model.array(tensor)
            return values.dtype.kind in "fiu" and bool((values >= 0).all())
        node = self.model.producer.get(tensor)
        if node is None or depth == 0 or not is_default(node):
            return False
        if node.op_type in _NEVER_NEGATIVE or self._clips_at_zero(node):
            return True
        if node.op_type == "DequantizeLinear":
            return starts_at_zero(self.model, node)
        if node.op_type == "Mul" and len(set(node.inputs)) == 1:  # a square
            return True
        return node.op_type in _KEEPS_SIGN and self._operands_keep(node, depth)

    def _operands_keep(self, node: Node, depth: int) -> bool:
        """Whether no operand of a node is ever negative; constants are checked first."""
        if any(float(str(node.attributes.get(factor, 1.0))) < 0 for factor in ("alpha", "beta")):
            return False
        operands = sorted(_values(node), key=lambda name: name not in self.model.constants)
        return all(self.never_negative(name, depth - 1) for name in operands)

    def _clips_at_zero(self, node: Node) -> bool:
        """Whether a node is a Clip whose lower bound is known and at least zero."""
        if node.op_type != "Clip" or not is_default(node):
            return False
        if len(node.inputs) > 1 and node.inputs[1]:
            return self.never_negative(node.inputs[1], 0)
        return float(str(node.attributes.get("min", -1.0))) >= 0  # an attribute before opset 11


def starts_at_zero(model: Model, node: Node) -> bool:
    """Whether the smallest value that a Q or DQ represents is zero: its zero point is the lowest integer."""
    if len(node.inputs) < 3 or node.inputs[2] not in model.constants:
        return False
    zero_point = model.array(node.inputs[2])
    if zero_point.dtype not in (np.uint8, np.int8, np.uint16, np.int16):
        return False
    return bool((zero_point == np.iinfo(zero_point.dtype).min).all())


def _values(node: Node) -> list[str]:
    """The operands that are values; other inputs are axes, shapes and indices."""
    if node.op_type == "Pad":
        return [name for name in (*node.inputs[:1], *node.inputs[2:3]) if name]
    if node.op_type in COPY_OPS or node.op_type in _REDUCES:
        return [*node.inputs[:1]]
    return [name for name in node.inputs if name]
