"""What Q/DQ can stand before and after each operator. Tables only; may import floor 0 and the model view.

Sources: the ONNX operator documents for input roles, and what ONNX Runtime and TensorRT document as
quantizable. Whether a backend really runs an operator in integers is the backend's own table.
"""

from __future__ import annotations

import onnx

from qdqspec.graph.model import Model, Node

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})

# Operators whose further inputs are parameters (bounds, axes, shapes, statistics), never activations.
DATA_INPUTS: dict[str, tuple[int, ...]] = {
    "Where": (1, 2),
    "Conv": (0, 1),
    "ConvTranspose": (0, 1),
    "Gemm": (0, 1),
    **dict.fromkeys(
        (
            "BatchNormalization", "Clip", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
            "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "PRelu", "Pad",
            "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Reshape", "Resize", "RMSNormalization", "Slice",
            "Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze", "Upsample",
        ),
        (0,),
    ),
}  # fmt: skip

# Operators that only move values: their output has the numbers of their input.
COPY_OPS = frozenset(
    {
        "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad",
        "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip

# Operators with a constant weight: input index, and the axis of its output channels.
WEIGHT_INPUT = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}

NEVER = frozenset(
    {
        "Cast", "Constant", "ConstantOfShape", "DequantizeLinear", "DynamicQuantizeLinear", "EyeLike", "If", "Loop",
        "NonZero", "QuantizeLinear", "RandomNormal", "Range", "Scan", "Shape", "Size",
    }
)  # fmt: skip


def data_inputs(node: Node) -> tuple[int, ...]:
    """Indexes of the inputs that carry activations or weights, present ones only."""
    wanted = DATA_INPUTS.get(node.op_type, tuple(range(len(node.inputs))))
    return tuple(i for i in wanted if i < len(node.inputs) and node.inputs[i])


def weight_input(model: Model, node: Node) -> int | None:
    """The index of a constant float weight of a linear operator, or ``None``."""
    index = WEIGHT_INPUT.get(node.op_type)
    if index is None or index >= len(node.inputs) or node.inputs[index] not in model.constants:
        return None
    return index


def channel_axis(model: Model, node: Node, index: int) -> int | None:
    """The axis of a weight's output channels; ``None`` where one scale for all is the only choice."""
    rank = len(model.constants[node.inputs[index]].dims)
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if node.attributes.get("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get("transB", 0) else 1
    return 1 if rank == 2 else None


def bias_input(model: Model, node: Node, channels: int) -> int | None:
    """The index of a constant bias of so many channels that a Gemm adds, or an Add after a MatMul.

    A bias that is broadcast otherwise, from one value or over rows, is none that integer kernels take.
    """
    for index in (2,) if node.op_type == "Gemm" else (0, 1):
        constant = model.constants.get(node.inputs[index]) if index < len(node.inputs) else None
        if constant is not None and list(constant.dims) == [channels]:
            return index
    return None


def is_float(model: Model, tensor: str) -> bool:
    """Whether a tensor is known to hold floating-point numbers."""
    return model.elem_type(tensor) in FLOATS
