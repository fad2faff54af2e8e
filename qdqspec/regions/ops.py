"""What region discovery and patterns need to know of operators. Tables only; imports nothing.

Operators that are not listed, of unknown domains too, are ordinary compute: they may end up anywhere
in a region and never start one.
"""

from __future__ import annotations

# A region is built around these: they do the work, and everything light that follows joins them.
ANCHORS = frozenset(
    {
        "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv",
        "Attention", "Einsum", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul",
        "GRU", "LSTM", "RNN",
        "If", "Loop", "Scan",
    }
)  # fmt: skip

# They change the resolution, which is where one stage of a network ends and the next begins.
POOLS = frozenset(
    {
        "AveragePool",
        "GlobalAveragePool",
        "GlobalLpPool",
        "GlobalMaxPool",
        "LpPool",
        "MaxPool",
        "Resize",
        "Upsample",
    }
)

# They move values and compute nothing, so a region of them alone would offer nothing to decide.
COPIES = frozenset(
    {
        "Cast", "CastLike", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
        "Identity", "Pad", "Reshape", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "SplitToSequence",
        "Squeeze", "Tile", "Transpose", "Unsqueeze",
        "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear",
    }
)  # fmt: skip

# What they return says something of a tensor's form, nothing of its values.
SHAPE_SOURCES = frozenset({"Shape", "Size"})

# Operand order does not change what they compute.
COMMUTATIVE = frozenset(
    {
        "Add",
        "And",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Equal",
        "Max",
        "Mean",
        "Min",
        "Mul",
        "Or",
        "Sum",
        "Xor",
    }
)
