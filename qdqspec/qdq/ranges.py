"""Ranges of tensors, the groups of tensors that must share one, and the values beyond which readers saturate.

Independent of number formats: `quantizer` converts ranges to scales and zero points.

A convolution before a GELU or HardSwish has values of both signs, but all large negative ones give nearly the
same result. A range that is clipped where the readers no longer distinguish values loses nearly nothing, and has
smaller steps. The readers are followed to the first operators that are not elementwise functions of this tensor and
constants. What is before these is one function of a single number, or of one for each channel, and is computed on a
grid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array, Floats
from qdqspec._core.groups import joined
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import FLOATS, SHAPE_SOURCES, copies_values, is_default, is_nearest

_STEPS = 255  # of an 8-bit range
_POINTS = 1025  # of the grid over the range; fewer if there is a function for each channel
_LEAST_POINTS = 129
_MOST_VALUES = 1 << 17  # of one tensor
_BEYOND = np.linspace(0, 1, 17)[1:]  # points outside of the range, in its sizes
_ELEMENTWISE = frozenset(
    {
        "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Min",
        "Mish", "Mul", "Neg", "PRelu", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sub", "Sum",
        "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The lowest and highest real value to represent. Zero is always included, so that it stays exact.

    ``kept`` are numbers that formats must have in it, in place of those computed from it: by format, scale and zero
    point. Several formats of one tensor round the ends of its range differently.
    """

    low: float
    high: float
    kept: tuple[tuple[str, float, int], ...] = ()

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
        low, high = min(self.low, other.low), max(self.high, other.high)
        is_one = (self.low, self.high) == (other.low, other.high)
        return TensorRange(low, high, tuple(own for own in self.kept if is_one and own in other.kept))


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
    tied: list[tuple[str, ...]] = []
    for node in model.nodes:
        if is_default(node) and node.op_type == "Concat":
            tied.append((*node.inputs, *node.outputs))
        elif is_default(node) and node.op_type in ("Dropout", "MaxPool"):
            tied.append((node.inputs[0], node.outputs[0]))  # the second output is a mask, or indices
        elif copies_values(node) or is_nearest(node):
            tied.append((node.inputs[0], *node.outputs))
    tied = [tuple(filter(None, tensors)) for tensors in tied]
    groups = joined({**wanted, **dict.fromkeys(chain.from_iterable(tied))}, tied)
    own = (tuple(tensor for tensor in group if tensor in wanted) for group in groups)
    return tuple(group for group in own if group)


@dataclass(frozen=True, slots=True)
class Saturation:
    """The values between which a tensor's readers distinguish values; infinite where they always do."""

    low: float = -math.inf
    high: float = math.inf

    def within(self, span: TensorRange) -> TensorRange:
        """The part of a range that readers distinguish."""
        return TensorRange(max(span.low, self.low), min(span.high, self.high))


def saturations(
    model: Model,
    ranges: Mapping[str, TensorRange],
    kept: Collection[str] = (),
    *,
    tolerance: float = 1 / 32,
    most_nodes: int = 24,
) -> dict[str, Saturation]:
    """The ends of what the readers of these tensors distinguish; none where they distinguish all values.

    ``ranges`` are tied (`tie_ranges`): tensors that share a range share its ends. Values beyond an end change the
    results by less than ``tolerance`` of the change by one step where the function is steepest: a larger one makes
    smaller steps, and more error beyond the end. An end that is not zero is one step farther, since it is rounded with
    the zero point. No function is followed over more than ``most_nodes``, which limits the time. No end have outputs of
    the model, tensors from which elementwise operators alone compute an output, and tensors that share a range with a
    ``kept`` tensor.
    """
    found: dict[str, Saturation] = {}
    shown = model.captured.union(model.outputs)
    for group in tied_groups(model, ranges):
        span = ranges[group[0]]
        if span.high == span.low or not {*kept}.isdisjoint(group):
            continue
        function = _Function(model, shown, group, most_nodes)
        if function.results and not function.is_seen_whole:
            end = _find_ends(function, span, tolerance)
            if end is not None:
                found |= dict.fromkeys(group, end)
    return found


class _Function:
    """The elementwise ``nodes`` that read the values of a group of tensors, and their ``results`` that others read.

    ``shown`` are the tensors that callers and bodies read. The function ``is_seen_whole`` if an
    operator or a caller distinguishes all values.
    """

    def __init__(self, model: Model, shown: Collection[str], group: tuple[str, ...], most_nodes: int) -> None:
        self.model, self.group, fixed = model, group, model.fixed_constants
        self.nodes: list[onnx.NodeProto] = []
        same, made, read = {*self.group}, set[str](), set[str]()
        waiting = self._find_readers(self.group)
        while waiting:
            node, known = model.nodes[min(waiting)], same | made
            waiting.remove(node.index)
            operands = {tensor for tensor in node.inputs if tensor and tensor not in fixed}
            if is_default(node) and node.op_type in SHAPE_SOURCES:
                continue
            if len(self.nodes) >= most_nodes:
                read |= known & operands
            elif (_selects(node, model) and known & operands == {node.inputs[0]}) or (
                is_default(node) and node.op_type == "Concat" and operands and operands <= same
            ):
                outputs = [tensor for tensor in node.outputs if tensor]
                (same if operands & same else made).update(outputs)
                source = [*known & operands][:1]
                others = [tensor for tensor in outputs if tensor not in self.group]
                self.nodes += [helper.make_node("Identity", source, [tensor]) for tensor in others]
                waiting |= self._find_readers(outputs)
            elif _is_elementwise(node, fixed) and operands <= known:
                made.update(node.outputs)
                self.nodes.append(node.proto)
                waiting |= self._find_readers(node.outputs)
            else:
                read |= known & operands
        self.is_seen_whole = not read.isdisjoint(same) or not (same | made).isdisjoint(shown)
        self.results = sorted(read)
        read_here = dict.fromkeys(tensor for node in self.nodes for tensor in node.input if tensor)
        self._constants = [tensor for tensor in read_here if tensor in fixed]

    def _find_readers(self, tensors: Iterable[str]) -> set[int]:
        """The indexes of the nodes that read these tensors."""
        return {node.index for tensor in tensors for node in self.model.readers(tensor)}

    def channels(self) -> tuple[int, ...] | None:
        """The shape of all constants together, with one function for each of its elements; ``None`` if it has none."""
        try:
            return np.broadcast_shapes(*(tuple(self.model.constants[t].dims) for t in self._constants))
        except ValueError:
            return None

    def at(self, grid: Array, dimensions: int) -> Iterator[Floats]:
        """Each result for the values of a grid: one row for each value. Nothing if they cannot be computed.

        No constant has more ``dimensions``.
        """
        from qdqspec.graph import evaluator_of  # imported late: it takes as long as all of onnx

        values = grid.reshape(-1, *[1] * dimensions)
        inputs = [helper.make_tensor_value_info(t, TensorProto.FLOAT, values.shape) for t in self.group]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.results]
        constants = []
        for tensor in self._constants:
            value = self.model.array(tensor)
            real = value if np.issubdtype(value.dtype, np.integer) else value.astype(np.float32)
            constants.append(numpy_helper.from_array(real, tensor))
        graph = helper.make_graph(self.nodes, "function", inputs, outputs, constants)
        proto = helper.make_model(graph, opset_imports=list(self.model.flat.opset_import), ir_version=10)
        try:
            with np.errstate(all="ignore"):
                found = evaluator_of(proto).run(None, dict.fromkeys(self.group, values))
        except Exception:  # noqa: BLE001 - a function that the reference implementation cannot compute has no ends
            return
        for one in found:
            yield np.asarray(one, np.float64).reshape(len(grid), -1)


def _selects(node: Node, model: Model) -> bool:
    """Whether an operator returns values of its first input, in another order or float type, or the largest."""
    if is_default(node) and node.op_type == "Cast":
        return node.number("to", 0) in FLOATS and model.elem_type(node.inputs[0]) in FLOATS
    if is_default(node) and node.op_type in ("Dropout", "GlobalMaxPool", "MaxPool", "ReduceMax"):
        return len(node.outputs) == 1
    return copies_values(node) or is_nearest(node)


def _is_elementwise(node: Node, fixed: Collection[str]) -> bool:
    return (
        is_default(node)
        and node.op_type in _ELEMENTWISE
        and (node.op_type != "Div" or node.inputs[1] in fixed)
    )


def _find_ends(function: _Function, span: TensorRange, tolerance: float) -> Saturation | None:
    """The ends of a range: beyond an end, the function gives nearly the same result. ``None`` without an end."""
    channels = function.channels()
    count = 0 if channels is None else math.prod(channels)
    points = min(_POINTS, _MOST_VALUES // count) if count else 0
    if channels is None or points < _LEAST_POINTS:
        return None
    size = span.high - span.low
    inside = np.linspace(span.low, span.high, points)
    inside[np.abs(inside).argmin()] = 0.0
    grid = np.concatenate([span.low - size * _BEYOND[::-1], inside, span.high + size * _BEYOND])
    results = list(function.at(grid.astype(np.float32), len(channels)))
    if not results or not all(np.isfinite(values).all() for values in results):
        return None
    steps = np.diff(inside)[:, None]
    first, last = len(_BEYOND), len(_BEYOND) + points
    slopes = (np.abs(np.diff(values[first:last], axis=0) / steps).max(axis=0) for values in results)
    tolerances = [tolerance * size / _STEPS * steepest for steepest in slopes]
    low = min(map(_count_same, results, tolerances))
    high = min(map(_count_same, (values[::-1] for values in results), tolerances))
    if max(low, high) == len(grid):  # a constant
        return None
    ends = grid[low - 1] if low > 1 else -math.inf, grid[-high] if high > 1 else math.inf
    step = (min(ends[1], span.high) - max(ends[0], span.low)) / _STEPS
    end = Saturation(
        low=min(ends[0] - step, 0.0) if ends[0] < 0 else 0.0,
        high=max(ends[1] + step, 0.0) if ends[1] > 0 else 0.0,
    )
    return None if end.within(span) == span else end


def _count_same(values: Floats, tolerances: Floats) -> int:
    """The number of first rows that are the same within a tolerance for each column."""
    highest, lowest = np.maximum.accumulate(values), np.minimum.accumulate(values)
    differs = (np.maximum(highest - values, values - lowest) > tolerances).any(axis=1)
    return int(np.argmax(differs)) if differs.any() else len(values)
