"""What TensorRT runs in narrow formats, by compute capability and version. A table; may import floor 0 only.

Sources: NVIDIA's TensorRT documentation, "Working with Quantized Types" (Q/DQ layer-placement
recommendations) and support matrix; recorded engines of ResNet-18 under four placements. None of it was
measured by us. What an operator type cannot express:

- Weighted operators take integers in and give integers or floats out, and all their inputs must be quantized.
- Operators that only move values (and MaxPool) let Q and DQ pass, where the scales on both sides are equal.
- Others that are not weighted need integers on both sides to run in integers, save pooling: a Q before a
  GlobalAveragePool alone removed a conversion and gained 8 % in a recorded engine.
- Softmax, LayerNormalization, GELU run in float in any case; a Q behind them fuses into their kernel.
- Biases stay float. An int32 bias behind a DequantizeLinear is refused by the parser.
"""

from __future__ import annotations

from qdqspec.types import Kind

_BOTH: tuple[Kind, ...] = ("in+out", "in-only")
_FULL: tuple[Kind, ...] = ("in+out",)

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLING = ("AveragePool", "GlobalAveragePool")
COMPUTING = ("Add",)
MOVING = (
    "Concat", "DepthToSpace", "Flatten", "MaxPool", "Pad", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(WEIGHTED + POOLING, _BOTH),
    **dict.fromkeys(COMPUTING + MOVING, _FULL),
}

# Conv + BatchNormalization + Relu + Q is one kernel, so the Q stands after them.
ABSORBED = frozenset({"BatchNormalization", "Clip", "Dropout", "Identity", "Relu"})

RULES = frozenset({"conv-to-layernorm", "q-before-pad", "skip-side-of-residual-add"})

# Weights alone in blocks lie along the axis that products are summed over, the last or the last but one.
BLOCKED = frozenset({"int4", "mxfp8", "nvfp4"})
BLOCKED_AXES: dict[str, tuple[int, ...]] = {"MatMul": (0,), "Gemm": (0, 1)}

# Format: the first compute capability that computes in it, and the first TensorRT of those we support.
# Not every later GPU has what an earlier one has: MXFP8 is for data centers (10.x) only.
FORMATS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "int8": ((7, 5), (10, 9)),
    "fp8": ((8, 9), (10, 9)),
    "int4": ((8, 0), (10, 9)),
    "nvfp4": ((10, 0), (10, 9)),
    "mxfp8": ((10, 0), (10, 12)),
}
_NOT_ON = {"mxfp8": 12}  # major of the compute capability


def formats_for(capability: tuple[int, int], version: tuple[int, int]) -> tuple[str, ...]:
    """The formats that a GPU computes in under a version; only ``int8`` where the GPU is not known, (0, 0)."""
    if capability == (0, 0):
        return ("int8",)
    return tuple(
        name
        for name, (first, since) in FORMATS.items()
        if capability >= first and version >= since and _NOT_ON.get(name) != capability[0]
    )
