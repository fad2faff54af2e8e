"""Weights and biases of nodes, and the axes of their channels or blocks.

`qdqspec.graph.ops` has the properties of operators.
"""

from __future__ import annotations

from onnx import TensorProto

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import WEIGHT_INPUT
from qdqspec.quantize.formats import NumberFormat

# The axis of a weight's output channels, for any rank; Gemm's depends on its attributes.
WEIGHT_AXES = {"Conv": 0, "ConvTranspose": 1}
RECURRENT = frozenset({"LSTM"})
_BLOCKED_RANKS = (2, 3)


def weight_input(model: Model, node: Node) -> int | None:
    """The index of a constant float weight of a linear operator, or ``None``."""
    index = WEIGHT_INPUT.get(node.op_type)
    if index is None or index >= len(node.inputs) or node.inputs[index] not in model.constants:
        return None
    return index


def weight_inputs(model: Model, node: Node) -> tuple[int, ...]:
    """The indexes of the constant weights of a linear operator, or of an LSTM: of its input and its hidden state."""
    if node.op_type in RECURRENT:
        found = tuple(index for index in (1, 2) if node.inputs[index] in model.constants)
        return found if len(found) == len((1, 2)) else ()
    index = weight_input(model, node)
    return () if index is None else (index,)


def channel_axis(model: Model, node: Node, index: int) -> int | None:
    """The axis of a weight's output channels; ``None`` if only one scale for all is possible."""
    rank = len(model.constants[node.inputs[index]].dims)
    if node.op_type == "ConvTranspose" and node.attributes.get("group", 1) != 1:
        return None
    if node.op_type in WEIGHT_AXES:
        return WEIGHT_AXES[node.op_type]
    if node.op_type == "Gemm":
        return 0 if node.attributes.get("transB", 0) else 1
    if (
        node.op_type in RECURRENT
    ):  # a scale for each row where there is one direction, else one for each direction
        return 1 if model.constants[node.inputs[index]].dims[0] == 1 else 0
    return 1 if rank == 2 else None


def summed_axis(model: Model, node: Node, index: int) -> int | None:
    """The axis of a two-dimensional weight that products are summed over; ``None`` for others."""
    if len(model.constants[node.inputs[index]].dims) != 2:
        return None
    return 1 if node.op_type == "Gemm" and node.attributes.get("transB", 0) else 0


def dynamic_misfit(model: Model, tensor: str, fmt: NumberFormat, axis: int | None) -> str | None:
    """The reason against dynamic quantization of an activation in blocks along an axis, or ``None``.

    The operators of `qdqspec.graph.trt` take two or three dimensions, the blocked one a constant of the build and a
    whole number of blocks. Blocks here are along the last one, which products are summed over.
    """
    shape = model.shape(tensor)
    if shape is None or len(shape) not in _BLOCKED_RANKS:
        have = "an unknown number" if shape is None else len(shape)
        return f"{fmt.name} activations are quantized in 2 or 3 dimensions, and it has {have}"
    if axis is not None and axis != len(shape) - 1:
        return f"{fmt.name} activations come in blocks along the last axis, not along {axis}"
    if not shape[-1] or shape[-1] % fmt.block:
        have = "not known" if not shape[-1] else str(shape[-1])
        return f"{fmt.name} comes in whole blocks of {fmt.block}, and its last dimension is {have}"
    return None


def is_dynamic_linear(model: Model, node: Node) -> bool:
    """Whether a kernel with ranges found at run time computes this operator, as its attributes and types are.

    Source: ONNX, DynamicQuantizeLinear (float32 only), MatMulInteger; ``com.microsoft``, DynamicQuantizeLSTM, which has
    no attribute ``layout``.
    """
    weights = weight_inputs(model, node)
    real = all(model.elem_type(node.inputs[index]) == TensorProto.FLOAT for index in (0, *weights))
    if not weights or not real:
        return False
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "layout": 0}
    return all(node.attributes.get(name, value) == value for name, value in plain.items())


def bias_input(model: Model, node: Node, channels: int) -> int | None:
    """The index of a constant bias with so many channels that a Gemm adds, or an Add after a MatMul.

    A bias that is broadcast otherwise, from one value or over rows, is not supported by integer kernels.
    """
    for index in (2,) if node.op_type == "Gemm" else (0, 1):
        constant = model.constants.get(node.inputs[index]) if index < len(node.inputs) else None
        if constant is not None and list(constant.dims) == [channels]:
            return index
    return None
