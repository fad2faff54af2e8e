"""Margins: ranges of activations wider than the calibration samples, which other samples exceed.

The largest value of a few samples is smaller than that of many. Values beyond a range are clipped, with an error that
may be larger than that of all rounding. Rounding grows by the factor of a margin.
"""

from __future__ import annotations

from collections.abc import Collection

from qdqspec.corrections.ranges import Ranges
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default
from qdqspec.quantize.ranges import TensorRange, tie_ranges

FACTORS = (1.1, 1.25)  # by which ranges are widened

_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def widened(
    model: Model, ranges: Ranges, factor: float, kept: Collection[str] = ()
) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of tensors whose values are bounded, and of the tensors ``kept``.

    Tied tensors have one range again.
    """
    if factor == 1.0:
        return dict(ranges)
    inputs = {*model.inputs, *kept}
    found = {
        tensor: span
        if tensor in inputs or _is_bounded(model, tensor)
        else TensorRange(factor * span.low, factor * span.high)
        for tensor, span in ranges.items()
    }
    return tie_ranges(model, found)


def _is_bounded(model: Model, tensor: str) -> bool:
    node = model.producer.get(tensor)
    return node is not None and is_default(node) and node.op_type in _BOUNDED
