"""Restores Relu and Clip that a quantizing tool removed because a zero point cuts off the same values.

ONNX Runtime's quantizer removes them with unsigned activations: without its pairs such a model computes
something else. Without the original this is a guess: a zero point at the end of the range may also come from
calibration. No Relu is inserted if the graph shows that none can have been removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from qdqspec.graph.dynamic_kernels import CARRIED
from qdqspec.graph.model import Model, Node
from qdqspec.placement.restore import is_dynamic
from qdqspec.placement.signs import Signs, starts_at_zero

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
