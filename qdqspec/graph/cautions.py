"""Warnings about properties of a model that make its measurements unreliable."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto, TypeProto

from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.units import list_text

_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_INTEGER = frozenset({"ConvInteger", "MatMulInteger"})
_DYNAMIC = frozenset(
    {"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
)  # com.microsoft
_TRAINS = 2  # index of Dropout's input `training_mode`
_SHOWN = 3


def cautions(model: Model) -> Iterator[str]:
    """Sentences, each with advice; none for an ordinary model."""
    random = [node.name for node in model.nodes if _is_random(model, node)]
    if random:
        yield f"its outputs are random ({_listed(random)}): comparing them proves little; export it for inference"
    present = [node.name for node in model.nodes if node.op_type in QDQ_OPS]
    if present:
        yield (
            f"it contains Q/DQ already ({_listed(present)}): it is part of the reference, and further pairs are "
            "tried around it; to search from the float model: qdqspec strip"
        )
    dynamic = [node for node in model.nodes if _is_dynamic(node)]
    if dynamic:
        yield _of_dynamic(dynamic)
    unseen = [output.name for output in model.proto.graph.output if not _is_numeric(output.type)]
    if unseen:
        yield f"outputs that are no tensors of numbers are not compared: {_listed(unseen)}"


def _of_dynamic(nodes: list[Node]) -> str:
    names = [node.name for node in nodes]
    kept = [node.name for node in nodes if node.op_type == "ConvInteger"]
    return (
        f"integer operators with ranges found at run time are in it already ({_listed(names)}): "
        "they are part of the reference and of each candidate, and pairs are tried on other operators only; "
        "to search from the float model: "
    ) + (
        f"give the model before quantization (qdqspec strip does not remove {_listed(kept)})"
        if kept
        else "qdqspec strip"
    )


def _is_dynamic(node: Node) -> bool:
    """Whether a node multiplies integers whose ranges are found at run time, as `quantize_dynamic` writes it."""
    return node.op_type in (_INTEGER if is_default(node) else _DYNAMIC)


def _is_random(model: Model, node: Node) -> bool:
    if not is_default(node):
        return False
    return node.op_type in _RANDOM or (node.op_type == "Dropout" and _drops_values(model, node))


def _drops_values(model: Model, dropout: Node) -> bool:
    """Whether a Dropout drops values: since opset 12 an input decides, and a computed one may."""
    mode = dropout.inputs[_TRAINS] if len(dropout.inputs) > _TRAINS else ""
    if not mode:
        return False
    return mode not in model.constants or bool(model.array(mode).any())


def _is_numeric(kind: TypeProto) -> bool:
    return not kind.HasField("value") or (
        kind.HasField("tensor_type") and kind.tensor_type.elem_type != TensorProto.STRING
    )


def _listed(names: list[str]) -> str:
    return list_text([f"'{name}'" for name in names], _SHOWN)
