"""Margins: ranges of activations wider than the calibration samples, which other samples exceed.

The largest value of a few samples is smaller than that of many. Values beyond a range are clipped, with an error that
may be larger than that of all rounding. Rounding grows by the factor of a margin.
"""

from __future__ import annotations

from collections.abc import Collection

from qdqspec.corrections.ranges import Ranges
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.quantize.ranges import TensorRange, tie_ranges, tied_groups

FACTORS = (1.1, 1.25)  # by which ranges are widened

_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def widened(
    model: Model, ranges: Ranges, factor: float, kept: Collection[str] = ()
) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of inputs, of bounded tensors, and of the tensors ``kept``.

    Tied tensors have one range again; those tied to one that is ``kept`` are kept as well.
    """
    if factor == 1.0:
        return dict(ranges)
    groups = tied_groups(model, ranges)
    same = {tensor for group in groups if not {*kept}.isdisjoint(group) for tensor in group}
    found = {
        tensor: span
        if tensor in same or _is_bounded(model, tensor)
        else TensorRange(factor * span.low, factor * span.high)
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
