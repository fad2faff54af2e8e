"""Properties of ONNX operators, in one table that regions, placement and calibration share.

The module holds tables and queries about single nodes. Source: the ONNX operator documents. Which operators
run in integers is defined by each backend's own table.

Operators that are not listed, including those of unknown domains, are ordinary compute. Inputs added in a
later opset come after the earlier ones, so input indexes are valid for each opset; where an operator's
meaning changed, the functions below take the opset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto

from qdqspec.graph.protos import CONTRIBUTED, DEFAULT_DOMAINS
from qdqspec.graph.trt import PAIR_OPS
from qdqspec.types import Consumer

if TYPE_CHECKING:
    from qdqspec.graph.model import Model, Node

QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", *PAIR_OPS})
OF_PAIRS = QDQ_OPS | {"DynamicQuantizeLinear"}  # which finds its range at run time

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})

# Each output value is a value of input 0 (or zero): one scale serves both sides.
COPY_OPS = frozenset(
    {
        "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad",
        "Reshape", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip

# They move values, but changed or of several inputs: there is nothing to compute or to quantize.
MOVING_OPS = COPY_OPS | {
    "Cast", "CastLike", "Concat", "SplitToSequence",
    "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear",
}  # fmt: skip

# A region is built around these: they do the main work, and light operators after them join them.
ANCHORS = frozenset(
    {
        "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv",
        "Attention", "Einsum", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul",
        "GRU", "LSTM", "RNN",
        "If", "Loop", "Scan",
    }
)  # fmt: skip

# They change the resolution, which is the border between stages of a network.
POOLS = frozenset(
    {
        "AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool", "Resize",
        "Upsample",
    }
)  # fmt: skip

# Their results depend on a tensor's shape, not on its values.
SHAPE_SOURCES = frozenset({"Shape", "Size"})

# Their results are random. Dropout's are in training only.
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

# They have graphs as attributes.
CONTROL = frozenset({"If", "Loop", "Scan"})
# Operators whose kernels take most of the time of usual models.
HEAVY = ANCHORS - CONTROL

# Operand order does not matter; see `is_commutative` for old opsets.
COMMUTATIVE = frozenset(
    {
        "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Max", "Mean", "Min", "Mul", "Or", "Sum",
        "Xor",
    }
)  # fmt: skip
_BROADCAST_FREELY_FROM = 7

# Operators whose further inputs are parameters (bounds, axes, shapes, statistics), never activations.
DATA_INPUTS: dict[str, tuple[int, ...]] = {
    "Where": (1, 2),
    "Conv": (0, 1),
    "ConvTranspose": (0, 1),
    "Gemm": (0, 1),
    **dict.fromkeys(
        (
            *COPY_OPS,
            "BatchNormalization", "Clip", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
            "LpNormalization", "PRelu", "RMSNormalization", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
            "Resize", "TopK", "Upsample",
        ),
        (0,),
    ),
}  # fmt: skip

# Operators with inputs whose values set the size of an output: the indexes of these inputs.
_SIZES: dict[str, tuple[int, ...]] = {
    "Range": (0, 1, 2),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "ConstantOfShape": (0,),
    **dict.fromkeys(("Expand", "OneHot", "Pad", "Reshape", "Split", "Tile", "TopK", "Upsample"), (1,)),
}

# Operators with a constant weight: the index of its input.
WEIGHT_INPUT = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}

# No pair is inserted before or after them.
NEVER = frozenset(
    {
        "Cast", "Constant", "ConstantOfShape", "DequantizeLinear", "DynamicQuantizeLinear", "EyeLike", "If", "Loop",
        "NonZero", "QuantizeLinear", "RandomNormal", "Range", "Scan", "Shape", "Size",
    }
)  # fmt: skip


def is_default(node: Node | onnx.NodeProto) -> bool:
    """Whether a node's operator is one of ONNX's own, and not another domain's of the same name."""
    return node.domain in DEFAULT_DOMAINS


def is_fused_attention(node: Node | onnx.NodeProto) -> bool:
    """Whether it is the attention of domain ``com.microsoft``, with the product that makes queries, keys and values.

    Optimizers for transformers write it. The operator of that name in ONNX has no weights.
    """
    return node.op_type == "Attention" and node.domain == CONTRIBUTED


def is_constant_node(node: Node | onnx.NodeProto) -> bool:
    """Whether a node only defines a constant."""
    return node.op_type == "Constant" and is_default(node)


def copies_values(node: Node) -> bool:
    """Whether all its outputs hold values of input 0 only."""
    return is_default(node) and node.op_type in COPY_OPS


def is_nearest(node: Node) -> bool:
    """Whether a Resize or Upsample selects values without interpolation, which is the default of both."""
    return (
        is_default(node)
        and node.op_type in ("Resize", "Upsample")
        and node.attributes.get("mode", b"nearest") == b"nearest"
    )


def is_commutative(node: Node, opset: int) -> bool:
    """Whether operands may be swapped. Before opset 7 only the second one was broadcast."""
    return (
        is_default(node)
        and node.op_type in COMMUTATIVE
        and (opset >= _BROADCAST_FREELY_FROM or not node.attributes.get("broadcast", 0))
    )


def data_inputs(node: Node) -> tuple[int, ...]:
    """Indexes of the present inputs that carry activations or weights."""
    inputs = node.inputs
    wanted = DATA_INPUTS.get(node.op_type, range(len(inputs)))
    return tuple([i for i in wanted if i < len(inputs) and inputs[i]])


def summed_axis(node: Node) -> int:
    """The axis of the two-dimensional weight of a MatMul or Gemm that products are summed over."""
    return int(bool(node.attributes.get("transB", 0)))


def weight_input(model: Model, node: Node) -> int | None:
    """The index of a constant float weight of a linear operator, or ``None``."""
    index = WEIGHT_INPUT.get(node.op_type)
    if index is None or node.input_at(index) not in model.constants:
        return None
    return index


def has_floats(model: Model) -> bool:
    """Whether any tensor of it is stored or fed in float32."""
    kinds = {tensor.data_type for tensor in model.initializers.values()}
    return TensorProto.FLOAT in kinds | {model.elem_type(name) for name in model.inputs}


def is_float(model: Model, tensor: str) -> bool:
    """Whether a tensor is known to hold floating-point numbers that can be quantized."""
    return model.elem_type(tensor) in FLOATS


def reads_data(model: Model, end: Consumer) -> bool:
    """Whether a node reads an activation or weight there, and not a bound, scale, shape or statistic."""
    node = model.by_name[end.node]
    wanted = DATA_INPUTS.get(node.op_type)
    return not node.is_marker and (wanted is None or end.input in wanted)


def made_of_shapes(model: Model) -> frozenset[str]:
    """Tensors that are computed from shapes and constants alone, also in floating point."""
    found: set[str] = set()
    for node in model.nodes:
        operands = [name for name in _read(model, node) if name and name not in model.constants]
        if node.op_type in SHAPE_SOURCES or (operands and found.issuperset(operands)):
            found.update(name for name in node.outputs if name)
    return frozenset(found)


def made_of_constants(model: Model) -> frozenset[str]:
    """The constants that no caller can replace, and the tensors that are computed from them alone."""
    found = set(model.fixed_constants)
    for node in model.nodes:
        is_plain = not node.is_marker and node.name not in model.bodies and not node.body_reads
        if is_plain and node.op_type not in RANDOM and found.issuperset(filter(None, node.inputs)):
            found.update(node.outputs)
    return frozenset(found - {""})


def setters_of_sizes(model: Model) -> frozenset[str]:
    """The nodes whose values set the size of a tensor, as predicted lengths of sounds do.

    Noise there gives outputs of another shape, which cannot be compared. A tensor of which only the shape is read sets
    no size.
    """
    nodes = [node for node in model.nodes if is_default(node)]
    return sources_of(model, (n.input_at(index) for n in nodes for index in _SIZES.get(n.op_type, ())))


def sources_of(model: Model, tensors: Iterable[str]) -> frozenset[str]:
    """The nodes, also in bodies, whose values these tensors are computed from; not those of which shapes are read."""
    found: set[str] = set()
    pending = [*tensors]
    while pending:
        maker = model.producer.get(pending.pop())
        if maker is not None and maker.name not in found and maker.op_type not in SHAPE_SOURCES:
            found.add(maker.name)
            pending += (*_read(model, maker), *maker.proto.input)  # the latter with the ends of bodies
    return frozenset(found)


def _read(model: Model, node: Node) -> tuple[str, ...]:
    """The inputs of a node, and what its bodies read and give."""
    if not (model.has_bodies or model.subgraph_reads):
        return node.inputs
    given = [name for end in model.bodies.get(node.name, ()) for name in end.inputs[:-1]]
    return (*node.inputs, *node.body_reads, *given)
