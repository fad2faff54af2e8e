"""Ranges of tensors, and the groups of tensors that must share one.

Independent of number formats: `scales` converts ranges to scales and zero points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.graph.unify import joined


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The lowest and highest real value to represent. Zero is always included, so that it stays exact."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low > self.high:
            raise ValueError(f"not a range: {self.low} to {self.high}")
        object.__setattr__(self, "low", min(self.low, 0.0))
        object.__setattr__(self, "high", max(self.high, 0.0))

    @property
    def largest(self) -> float:
        """The largest magnitude in it."""
        return max(-self.low, self.high)

    def union(self, other: TensorRange) -> TensorRange:
        """The smallest range that holds both."""
        return TensorRange(min(self.low, other.low), max(self.high, other.high))


def tie_ranges(model: Model, ranges: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """Give one range, their union, to tensors that a runtime can only merge at equal scales.

    These are the input and outputs of operators that copy values (including MaxPool and nearest Resize), and all inputs
    and the output of a Concat. Tensors without a range extend the group and get none.
    """
    found = dict(ranges)
    for group in tied_groups(model, ranges):
        found |= dict.fromkeys(group, reduce(TensorRange.union, (ranges[tensor] for tensor in group)))
    return found


def tied_groups(model: Model, tensors: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of tensors to which `tie_ranges` gives one range."""
    wanted = dict.fromkeys(tensors)
    tied = [_tied(node) for node in model.nodes]
    groups = joined({**wanted, **dict.fromkeys(chain.from_iterable(tied))}, tied)
    own = (tuple(tensor for tensor in group if tensor in wanted) for group in groups)
    return tuple(group for group in own if group)


def _tied(node: Node) -> tuple[str, ...]:
    tensors: tuple[str, ...] = ()
    if is_default(node) and node.op_type == "Concat":
        tensors = (*node.inputs, *node.outputs)
    elif is_default(node) and node.op_type in ("Dropout", "MaxPool"):
        tensors = node.inputs[0], node.outputs[0]  # the second output is a mask, or indices
    elif copies_values(node) or is_nearest(node):
        tensors = node.inputs[0], *node.outputs
    return tuple(filter(None, tensors))
