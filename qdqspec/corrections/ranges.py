"""Corrections of ranges: one calibration method and one margin for all activations.

Each is judged by ranges of the even samples on the odd ones. A margin is a range wider than that of the samples, which
other data exceeds: values beyond a range are clipped, with an error that may be larger than that of all rounding, which
grows by the factor of the margin only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.quantize.ranges import TensorRange, tie_ranges

Ranges = Mapping[str, TensorRange]

_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def range_options(
    methods: Sequence[str], own: str, factors: Sequence[float] = (1.05, 1.125)
) -> Iterator[tuple[str, float]]:
    """Method and factor of each option other than the ranges in use, those of the ``own`` method.

    More ``factors`` widen the ranges for rarer values; each costs a judgement.
    """
    yield from ((own, factor) for factor in factors)
    yield from ((method, 1.0) for method in methods if method != own)


def widened(model: Model, ranges: Ranges, factor: float) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of inputs and of bounded tensors. Tied tensors have one again."""
    if factor == 1.0:
        return dict(ranges)
    found = {
        tensor: span if _is_bounded(model, tensor) else TensorRange(factor * span.low, factor * span.high)
        for tensor, span in ranges.items()
    }
    return tie_ranges(model, found)


def _is_bounded(model: Model, tensor: str) -> bool:
    """Whether a tensor has the values of a graph input, or of an operator with bounded results."""
    node = model.producer.get(tensor)
    while node is not None and is_default(node) and _copies(node):
        tensor = node.inputs[0]
        node = model.producer.get(tensor)
    return tensor in model.inputs or (node is not None and is_default(node) and node.op_type in _BOUNDED)


def _copies(node: Node) -> bool:
    return copies_values(node) or is_nearest(node) or node.op_type in ("Dropout", "MaxPool")
