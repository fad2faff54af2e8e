"""The operators that OpenVINO's CPU plugin runs in integers, as a table.

Derived from the runtime graphs of small models with OpenVINO 2026.4.1 (uint8 activations with any zero point, int8
weights per channel) and verified entry by entry against the installed version in
``tests/unit/backends/test_openvino_ops.py``. Conditions that an operator type cannot express:

- Conv, Gemm and MatMul need a constant weight (`Capabilities.constant_weight`); a float bias is added in the integer
  kernel. A ConvTranspose runs in float32 with uint8 activations.
- An Add or Sub of two quantized tensors is computed in the kernel of the convolution that makes one of them. If one
  side only has a pair, the sum is a separate kernel in float32.
- A Mul reads and writes integers if one operand is broadcast, as in squeeze-and-excitation blocks; of two
  convolutions of equal shape it is computed in float32.
- Resize runs in integers in mode ``nearest`` only.
- Where scale or zero point differ between both sides of an operator that moves values, a kernel that converts follows.
- If the output is in float32, operators that move values are followed by a kernel that dequantizes.
"""

from __future__ import annotations

from qdqspec.types import Kind

_BOTH: tuple[Kind, ...] = ("in+out", "in-only")
_FULL: tuple[Kind, ...] = ("in+out",)

LINEAR = ("Conv", "Gemm", "MatMul")
REDUCING = ("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum")
JOINING = ("Add", "Concat", "Mul", "Sub")
MOVING = (
    "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "MaxPool", "ReduceMax", "Reshape", "Resize",
    "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(LINEAR + REDUCING, _BOTH),
    **dict.fromkeys(JOINING + MOVING, _FULL),
}

# They are computed in the kernel of the convolution before them, with the Q after them. BatchNormalization is folded.
ABSORBED = frozenset(
    {
        "Abs", "BatchNormalization", "Clip", "Dropout", "Elu", "Gelu", "HardSwish", "Identity", "LeakyRelu", "Mish",
        "Neg", "PRelu", "Relu", "Sigmoid", "Sqrt", "Tanh",
    }
)  # fmt: skip
