"""The operators and formats that TensorRT quantizes, by compute capability and version, and sizes too small for it.

Sources: NVIDIA's TensorRT documentation, "Working with Quantized Types" (Q/DQ layer-placement
recommendations) and support matrix; recorded engines of ResNet-18 under four placements. None of it was
measured by this project. Conditions that an operator type cannot express:

- Weighted operators take integer inputs and output integers or floats, and all their inputs must be quantized.
- Operators that only move values (and MaxPool) commute with Q and DQ, if the scales on both sides are equal.
- Other unweighted operators need integers on both sides to run in integers, except pooling: a Q before a
  GlobalAveragePool alone removed a conversion and gained 8 % in a recorded engine.
- Softmax, LayerNormalization, GELU always run in float; a Q after them fuses into their kernel.
- Biases stay float. The parser rejects an int32 bias after a DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qdqspec._core.hooks import Hook
from qdqspec.backends.base import Capabilities, labels_of
from qdqspec.graph.ops import COPY_OPS
from qdqspec.types import Kind

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLING = ("AveragePool", "GlobalAveragePool")
COMPUTING = ("Add",)
MOVING = (
    "Concat", "DepthToSpace", "Flatten", "MaxPool", "Pad", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS = labels_of(alone=WEIGHTED + POOLING, between=COMPUTING + MOVING)

# Conv + BatchNormalization + Relu + Q is one kernel, so the Q is inserted after them.
ABSORBED = frozenset({"BatchNormalization", "Clip", "Dropout", "Identity", "Relu"})

# The functions of placement rules by name, in the order in which they are applied; each states its source.
RULES: dict[str, Hook] = {
    name: f"qdqspec.backends.tensorrt.placement:{name.replace('-', '_')}"
    for name in (
        "few-channel-conv", "large-fp8-kernel", "small-gemm", "fp8-operators", "whole-attention",
        "transpose-to-matmul", "skip-side-of-residual-add", "conv-to-layernorm", "q-before-pad",
    )
}  # fmt: skip

# Blocks run along the axis that products are summed over: of a weight the last or the last but one, of an activation
# the last. INT4 is for weights alone.
WEIGHT_ONLY = frozenset({"int4"})
BLOCKED_AXES: dict[str, tuple[int, ...]] = {"MatMul": (0,), "Gemm": (0, 1)}

# Pairs before these reach a product with such a weight, which then cannot be built: they move values, or multiply by
# numbers that the scale may contain. Measured with TensorRT for RTX 1.7.1.116: a pair before each of them is refused in
# int8 or fp8 ("Input and filter have to be the same type"), and not before any activation function, Add, Sub, mean or
# sum. No source states it for TensorRT; without pairs there nothing is lost but a conversion.
CARRIERS = COPY_OPS | {
    "Abs", "Concat", "Div", "GlobalMaxPool", "MaxPool", "Mul", "Neg", "ReduceMax", "ReduceMin",
}  # fmt: skip

# Format: the first compute capability that supports it, and the first supported TensorRT version.
# Not every later GPU supports an earlier GPU's formats: MXFP8 is for data centers (10.x) only.
FORMATS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "int8": ((7, 5), (10, 9)),
    "fp8": ((8, 9), (10, 9)),
    "int4": ((8, 0), (10, 9)),
    "nvfp4": ((10, 0), (10, 9)),
    "mxfp8": ((10, 0), (10, 12)),
}
_NOT_ON = {"mxfp8": 12}  # major of the compute capability
_GENERATIONS = {(7, 5): "Turing", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def capabilities(gpu: tuple[int, int], version: tuple[int, int]) -> Capabilities:
    """The capabilities of TensorRT on a GPU of this compute capability."""
    return capabilities_of({name: why_not(name, gpu, version) for name in FORMATS}, LABELS, RULES)


def capabilities_of(
    reasons: Mapping[str, str],
    labels: Mapping[str, tuple[Kind, ...]],
    rules: Mapping[str, Hook],
) -> Capabilities:
    """The capabilities of a compiler of this family; ``reasons`` are why it lacks a format, empty if it has it."""
    formats = tuple(name for name, why in reasons.items() if not why)
    return Capabilities(
        formats=formats,
        labels=labels,
        activations={name: name for name in formats if name not in WEIGHT_ONLY},
        weights={name: name for name in formats},
        absorbs=ABSORBED,
        symmetric_activations=True,
        blocked_axes=BLOCKED_AXES,
        carriers=CARRIERS,
        rules=rules,
        fuses_in_half=True,
        computes_in_half=True,
        hardware="gpu",
        lacking={name: why for name, why in reasons.items() if why},
        needs_shapes=True,
        observes=False,  # with every tensor an output nothing fuses, and one more engine must be built
    )


def why_not(name: str, capability: tuple[int, int], version: tuple[int, int]) -> str:
    """The reason why a GPU does not support a format under a version; empty if it does. (0, 0) is not known."""
    first, since = FORMATS[name]
    if capability == (0, 0):
        return "" if name == "int8" else f"the GPU is not known, and {name} is not for all"
    if capability < first:
        least = f"{dotted(first)} ({_GENERATIONS[first]})"
        return f"{name} needs compute capability {least}, and this GPU has {dotted(capability)}"
    if _NOT_ON.get(name) == capability[0]:
        return f"{name} is for compute capability {first[0]}.x, and this GPU has {dotted(capability)}"
    if version < since:
        return f"{name} needs TensorRT {dotted(since)}, and this is {dotted(version)}"
    return ""


def dotted(pair: tuple[int, int]) -> str:
    """``8.9``."""
    return ".".join(map(str, pair))


# Sizes that TensorRT's narrow kernels on tensor cores do not support well. Placement rules insert no pairs there, and
# lint reports pairs that are there. Source: NVIDIA Model-Optimizer, onnx/quantization/graph_utils.py
# (`find_nodes_from_convs_to_exclude`, `find_nodes_from_matmul_to_exclude`), which leaves these in float "as kernels are
# missing or slower".
_LEAST = 16  # channels of a convolution, rows and columns of the second operand of a product
_LEAST_KERNEL_IN_GROUPS = 3
_MULTIPLE = 8
LARGEST_FP8_KERNEL = 31  # elements: larger ones, such as 7x7, have slower fp8 kernels


def too_few_channels(weight: Sequence[int], *, group: int, fp8: bool, first: bool) -> bool:
    """Whether a convolution's weight, output channels first, has fewer channels than its kernels need.

    An fp8 one needs more than 16 on both sides. An int8 one needs 16, or a multiple of 8 on one side if one
    side has 16 or it is the ``first`` of the model, and a square kernel; or in groups a multiple of 8 output
    channels and a kernel of at least 3.
    """
    made, read, *kernel = weight
    if fp8:
        return min(made, read) <= _LEAST
    if min(made, read) >= _LEAST:
        return False
    if group > 1:
        return made % _MULTIPLE != 0 or min(kernel, default=0) < _LEAST_KERNEL_IN_GROUPS
    enough = max(made, read) >= _LEAST or first
    multiple = made % _MULTIPLE == 0 or read % _MULTIPLE == 0
    return not (multiple and enough and len(set(kernel)) <= 1)


def is_one_line(result: Sequence[int | None] | None) -> bool:
    """Whether a product has one row or one column: it is a product by a vector, which tensor cores do not speed up."""
    return result is not None and len(result) > 1 and 1 in result[-2:]


def too_small_to_multiply(weight: Sequence[int | None] | None) -> bool:
    """Whether the second operand of a product has fewer than 16 rows or columns. Unknown sizes are large enough."""
    return weight is not None and len(weight) > 1 and any(size and size < _LEAST for size in weight[-2:])
