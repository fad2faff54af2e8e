"""Ranges of tensors, and the groups of tensors that must share one.

Independent of number formats: `scales` converts ranges to scales and zero points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import copies_values, is_default, is_nearest


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
    leader = _leaders(model)
    union: dict[str, TensorRange] = {}
    for tensor, seen in ranges.items():
        key = leader.of(tensor)
        union[key] = union[key].union(seen) if key in union else seen
    return {tensor: union[leader.of(tensor)] for tensor in ranges}


def tied_groups(model: Model, tensors: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of tensors to which `tie_ranges` gives one range."""
    leader, groups = _leaders(model), dict[str, list[str]]()
    for tensor in tensors:
        groups.setdefault(leader.of(tensor), []).append(tensor)
    return tuple(map(tuple, groups.values()))


def _leaders(model: Model) -> _Leaders:
    leader = _Leaders()
    for node in model.nodes:
        tensors = _tied(node)
        for tensor in tensors[1:]:
            leader.join(tensors[0], tensor)
    return leader


def _tied(node: Node) -> tuple[str, ...]:
    if is_default(node) and node.op_type == "Concat":
        return _named((*node.inputs, *node.outputs))
    if is_default(node) and node.op_type in ("Dropout", "MaxPool"):
        return _named((node.inputs[0], node.outputs[0]))  # the second output is a mask, or indices
    if copies_values(node) or is_nearest(node):
        return _named((node.inputs[0], *node.outputs))
    return ()


def _named(tensors: Iterable[str]) -> tuple[str, ...]:
    return tuple(tensor for tensor in tensors if tensor)


class _Leaders:
    """Disjoint sets of tensor names, with path halving."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The representative of the set that contains ``name``."""
        parent = self._parent
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    def join(self, one: str, other: str) -> None:
        """Merge two sets."""
        self._parent[self.of(other)] = self.of(one)
