"""What the NPU's compiler takes in integers, as the types of its compiled graphs show (measured, QAIRT 2.51.0).

Activations are uint8 with any zero point on both sides of an operator: with another type on one side it runs in
float, and signed symmetric activations break Softmax (-40 dB on a whole model). Weights are int8 with zero point 0, per
channel for convolutions. A LayerNormalization stays float: in integers it costs 5 dB more than its pairs, and with a
bias of int32 beside activations of another type than its scale it leaves the NPU.
"""

from __future__ import annotations

from qdqspec.backends.base import Capabilities
from qdqspec.types import Kind

_FULL: tuple[Kind, ...] = ("in+out",)

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
OTHERS = (
    "Add", "AveragePool", "Concat", "Gelu", "GlobalAveragePool", "HardSwish", "Mul", "Sigmoid", "Softmax", "Sub",
    "Tanh",
)  # fmt: skip
MOVING = (
    "DepthToSpace", "Flatten", "Gather", "MaxPool", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
)  # fmt: skip
# Computed with the operator before them if the Q that follows clips as they do; a pair between them and the operator
# makes the compiler lose the bound of a Clip (-0.1 dB where the pair's range is wider).
ABSORBED = frozenset({"Clip", "Relu"})


def capabilities() -> Capabilities:
    """The operators that run in integers; nothing is timed, shapes are static."""
    return Capabilities(
        formats=("int8",),
        labels=dict.fromkeys((*LINEAR, *OTHERS, *MOVING), _FULL),
        activations={"int8": "uint8"},
        weights={"int8": "int8"},
        absorbs=ABSORBED,
        completes=frozenset({"Conv"}),
        has_clock=False,
        observes=False,
        per_layer_profile=False,
        needs_shapes=True,
        hardware="cpu",
    )
