"""Warnings about properties of a model that make its measurements unreliable."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto, TypeProto

from qdqspec._core.units import list_text
from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.ops import RANDOM, is_default, is_fused_attention

_INTEGER = frozenset({"ConvInteger", "MatMulInteger"})
# of domain com.microsoft
_DYNAMIC = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})
_TRAINS = 2  # index of Dropout's input `training_mode`
_SHOWN = 3


def cautions(model: Model) -> Iterator[str]:
    """Sentences, each with advice; none for an ordinary model."""
    random = random_nodes(model)
    if random:
        yield (
            f"its outputs are random ({_listed(random)}): comparing them proves little; export it for inference, or "
            "if an input scales the random numbers, give data where it is 0"
        )
    present = [node.name for node in model.nodes if node.op_type in QDQ_OPS]
    if present:
        yield (
            f"it contains Q/DQ already ({_listed(present)}): it is part of the reference, and further pairs are "
            "tried around it; to search from the float model: qdqspec strip"
        )
    # products of integers whose ranges are found at run time, as `quantize_dynamic` writes them
    dynamic = [n for n in model.nodes if n.op_type in (_INTEGER if is_default(n) else _DYNAMIC)]
    if dynamic:
        names = _listed([node.name for node in dynamic])
        yield (
            f"integer operators with ranges found at run time are in it already ({names}): they are part of the "
            "reference and of each candidate, and pairs are tried on other operators only; to search from the "
            "float model: qdqspec strip"
        )
    fused = [node.name for node in model.nodes if is_fused_attention(node)]
    if fused:
        yield (
            f"an optimizer has fused its attentions ({_listed(fused)}): the model before that step gives the search "
            "more choices, and may become faster"
        )
    unseen = [output.name for output in model.proto.graph.output if not _is_numeric(output.type)]
    if unseen:
        yield f"outputs that are no tensors of numbers are not compared: {_listed(unseen)}"


def random_nodes(model: Model) -> list[str]:
    """The names of nodes that draw random numbers in each run."""
    return [node.name for node in model.nodes if _is_random(model, node)]


def _is_random(model: Model, node: Node) -> bool:
    """Whether a node draws random numbers. Of a Dropout an input decides since opset 12, and a computed one may."""
    if not is_default(node) or node.op_type != "Dropout":
        return is_default(node) and node.op_type in RANDOM
    mode = node.input_at(_TRAINS)
    return bool(mode) and (mode not in model.constants or bool(model.array(mode).any()))


def _is_numeric(kind: TypeProto) -> bool:
    return not kind.HasField("value") or (
        kind.HasField("tensor_type") and kind.tensor_type.elem_type != TensorProto.STRING
    )


def _listed(names: list[str]) -> str:
    return list_text([f"'{name}'" for name in names], _SHOWN)
