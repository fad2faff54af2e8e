"""The operators that ONNX Runtime's CPU provider runs in integers, as a table.

Derived from the optimized graphs of single-operator models with ONNX Runtime 1.31.1 and 1.32.0 (uint8 asymmetric
activations, int8 weights) and verified entry by entry against the installed version in
``tests/unit/backends/test_ort_ops.py``. Conditions that an operator type cannot express:

- Conv needs Q/DQ on both sides; a float bias is quantized by ONNX Runtime itself. ConvTranspose never fuses.
- Gemm and MatMul run with a float output too. Gemm then needs an int32 bias after a DequantizeLinear
  (with a float one, Gemm stays float with a weight dequantized in every run), and so does a MatMul whose Add
  of a one-dimensional constant ONNX Runtime converts to a Gemm. Gemm does not check that the bias scale is
  the product of the other two: another one gives wrong results without an error.
- With a Relu or Clip directly after them, and more operators after that, both output integers or run in float.
- Per-channel weights of MatMul must be two-dimensional, with the axis last; others fail at run time, or run in
  float from 1.32 on if the result is quantized.
- Operators that move values, and MaxPool, need equal scale and zero point on both sides; Resize only
  in ``nearest`` mode, MaxPool from opset 12, which every model with pairs has.
- A batch normalization between a quantized Conv and its Q prevents the fusion: it must be folded before.
"""

from __future__ import annotations

from qdqspec.quantize.formats import BLOCK_SIZES
from qdqspec.types import Kind

_BOTH: tuple[Kind, ...] = ("in+out", "in-only")
_FULL: tuple[Kind, ...] = ("in+out",)

LINEAR = ("Gemm", "MatMul")
COMPUTING = (
    "Add", "AveragePool", "Concat", "Conv", "GlobalAveragePool", "LeakyRelu", "Mul", "Sigmoid", "Softmax", "Where",
)  # fmt: skip
MOVING = (
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "MaxPool", "Reshape", "Resize", "Slice", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(LINEAR, _BOTH),
    **dict.fromkeys(COMPUTING + MOVING, _FULL),
}

# Dynamic quantization with 8-bit weights: DynamicQuantizeMatMul or MatMulIntegerToFloat, DynamicQuantizeLSTM.
# There is no such kernel of GRU ("DynamicQuantizeGRU is not a registered function/op").
DYNAMIC = frozenset({*LINEAR, "LSTM"})

# They are absorbed by the Q after them: Relu if its zero point is the format's lowest value, Clip if
# its bounds enclose all that the scale can represent. Identity and Dropout are removed before.
ABSORBED = frozenset({"Clip", "Dropout", "Identity", "Relu"})

# Weights alone in 4 bits become a MatMulNBits where blocks run along the first axis: 5 times faster than float for
# one row of input, 1.3 times for 128. A transposed Gemm dequantizes its weight in every run instead, which takes
# ten times as long. No kernel takes 8-bit floats (MatMul fails to build, in 16 bits all is done in float), 4-bit
# floats or scales of powers of two ("could not find an implementation for DequantizeLinear").
# So do weights in 8 bits, measured with 1.32, which gain with one or few rows only:
# docs/decisions/0082-dynamic-labels.md.
BLOCKED_4 = ("int4", "uint4")
BLOCKED_8 = tuple(f"int8_b{size}" for size in BLOCK_SIZES)
BLOCKED_8_SINCE = (1, 32)
BLOCKED_AXES: dict[str, tuple[int, ...]] = {"MatMul": (0,), "Gemm": (0,)}
