"""Sizes that TensorRT's narrow kernels on tensor cores do not support well.

Source: NVIDIA Model-Optimizer, onnx/quantization/graph_utils.py (`find_nodes_from_convs_to_exclude`,
`find_nodes_from_matmul_to_exclude`), which leaves these in float "as kernels are missing or slower". None of it was
measured by this project. Placement rules insert no pairs there, and lint reports pairs that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

LEAST = 16  # channels of a convolution, rows and columns of the second operand of a product
_LEAST_KERNEL_IN_GROUPS = 3
_MULTIPLE = 8
LARGEST_FP8_KERNEL = 32  # elements: kernels of at least this size are slower

Dims = Sequence[int | None]


def too_few_channels(weight: Sequence[int], *, group: int, fp8: bool, first: bool) -> bool:
    """Whether a convolution's weight, output channels first, has fewer channels than its kernels need.

    An fp8 one needs more than 16 on both sides. An int8 one needs 16, or a multiple of 8 on one side if one
    side has 16 or it is the ``first`` of the model, and a square kernel; or in groups a multiple of 8 output
    channels and a kernel of at least 3.
    """
    made, read, *kernel = weight
    if fp8:
        return min(made, read) <= LEAST
    if min(made, read) >= LEAST:
        return False
    if group > 1:
        return made % _MULTIPLE != 0 or min(kernel, default=0) < _LEAST_KERNEL_IN_GROUPS
    enough = max(made, read) >= LEAST or first
    multiple = made % _MULTIPLE == 0 or read % _MULTIPLE == 0
    return not (multiple and enough and len(set(kernel)) <= 1)


def too_large_for_fp8(weight: Sequence[int]) -> bool:
    """Whether a convolution's kernel has 32 elements or more, as 7x7 has, for which fp8 kernels are slower."""
    return prod(weight[2:]) >= LARGEST_FP8_KERNEL


def is_one_line(result: Dims | None) -> bool:
    """Whether a product has one row or one column: it is a product by a vector, which tensor cores do not speed up."""
    return result is not None and len(result) > 1 and 1 in result[-2:]


def too_small_to_multiply(weight: Dims | None) -> bool:
    """Whether the second operand of a product has fewer than 16 rows or columns. Unknown sizes are large enough."""
    return weight is not None and len(weight) > 1 and any(size and size < LEAST for size in weight[-2:])
