"""Guiding tensors, at which the error that guides a search is measured: those before trailing operators that saturate.

After a Softmax, a Sigmoid or an ArgMax the quantization noise of single pairs is not additive, and more pairs may even
give a smaller error. Before it noise is additive, so that it can be attributed to pairs.
"""

from __future__ import annotations

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS, copies_values, is_default
from qdqspec.placement.space.units import Edge
from qdqspec.types import Consumer

# The output is bounded, or a selection of the input's elements.
SATURATING = frozenset(
    {
        "ArgMax", "ArgMin", "Clip", "HardSigmoid", "Hardmax", "LogSoftmax", "LpNormalization", "NonMaxSuppression",
        "Sigmoid", "Softmax", "Softsign", "Tanh", "TopK",
    }
)  # fmt: skip
_DATA: dict[str, tuple[int, ...]] = {"NonMaxSuppression": (0, 1)}  # data operands; the first for all others
_NORM_SOURCES = frozenset({"ReduceL1", "ReduceL2"})
_NORM_STEPS = frozenset(
    {"Add", "Clip", "Expand", "Max", "Sqrt", "Pow", "ReduceSum", "ReduceSumSquare", "Unsqueeze"}
)
_BROADCASTS = frozenset({"Clip", "Expand", "Identity", "Max", "Reshape", "Squeeze", "Unsqueeze"})


def guiding_outputs(model: Model) -> dict[str, tuple[Edge, ...]]:
    """For each graph output the edges before its trailing operators that saturate or select.

    Without such an operator that is the output itself. Trailing operators are followed backwards through those that
    only copy or convert values. A division by the norm of its own dividend counts as a normalization, one of
    exponentials by their sum as a Softmax.
    """
    ends = {name: (name, model.output_ends[name]) for name in dict.fromkeys(model.outputs)}
    return {name: tuple(trailing_operators(model, name)) or (end,) for name, end in ends.items()}


def trailing_operators(model: Model, output: str) -> dict[Edge, Node | None]:
    """The edges before an output's trailing operators that saturate or select, each with the first such operator.

    Empty if the output has none. An edge that leads to the output without one has ``None``.
    """
    found: dict[Edge, Node | None] = {}
    seen: set[str] = set()
    pending: list[tuple[Edge, Node | None]] = [((output, model.output_ends[output]), None)]
    saturated = False
    while pending:
        edge, operator = pending.pop()
        tensor = edge[0]
        node = model.producer.get(tensor)
        sources = () if node is None or tensor in model.constants else _sources(model, node)
        if not sources or tensor in seen:
            if not sources:
                found[edge] = operator
            continue
        seen.add(tensor)
        assert node is not None  # a node with sources exists
        if _saturates(model, node):
            saturated, operator = True, node
        pending += [(source, operator) for source in sources]
    real = {
        edge: operator
        for edge, operator in found.items()
        if model.elem_type(edge[0]) in FLOATS and edge[0] not in model.constants
    }
    return real if saturated else {}


def _sources(model: Model, node: Node) -> tuple[Edge, ...]:
    """The edges to which a trailing operator is followed; empty for an operator that computes."""
    if (logits := _logits(model, node)) is not None:
        return (logits,)
    return tuple((node.inputs[index], Consumer(node.name, index)) for index in _operands(model, node))


def _operands(model: Model, node: Node) -> tuple[int, ...]:
    if _saturates(model, node):
        return _DATA.get(node.op_type, (0,))
    selects = is_default(node) and node.op_type in ("Cast", "Gather", "GatherND", "GatherElements")
    if copies_values(node) or selects:
        chosen = (0, 1) if node.op_type.startswith("Gather") else (0,)
        return tuple(i for i in chosen if i < len(node.inputs) and node.inputs[i] not in model.constants)
    return ()


def _saturates(model: Model, node: Node) -> bool:
    if not is_default(node):
        return False
    return (
        node.op_type in SATURATING
        or (node.op_type == "Div" and _is_normalization(model, node))
        or _logits(model, node) is not None
    )


def _logits(model: Model, division: Node) -> Edge | None:
    """The input ``x`` of a Softmax in several operators.

    That is ``e / ReduceSum(e)`` with ``e = Exp(x)`` or ``e = Exp(x - ReduceMax(x))``.
    """
    if division.op_type != "Div" or not is_default(division):
        return None
    dividend, divisor = division.inputs[:2]
    exponential, total = model.producer.get(dividend), _reduction(model, divisor)
    if exponential is None or exponential.op_type != "Exp" or not is_default(exponential):
        return None
    if total is None or total.op_type != "ReduceSum" or total.inputs[0] != dividend:
        return None
    shift = model.producer.get(exponential.inputs[0])
    if shift is not None and shift.op_type == "Sub" and is_default(shift):
        largest = _reduction(model, shift.inputs[1])
        if largest is not None and largest.op_type == "ReduceMax" and largest.inputs[0] == shift.inputs[0]:
            return shift.inputs[0], Consumer(shift.name, 0)
    return exponential.inputs[0], Consumer(exponential.name, 0)


def _reduction(model: Model, tensor: str) -> Node | None:
    """The operator whose result is broadcast to a tensor, such as a sum."""
    node = model.producer.get(tensor)
    while node is not None and is_default(node) and node.op_type in _BROADCASTS:
        node = model.producer.get(next((name for name in node.inputs if name not in model.constants), ""))
    return node if node is not None and is_default(node) else None


def _is_normalization(model: Model, division: Node) -> bool:
    """Whether the divisor is the norm of the dividend: ``x / ReduceL2(x)``, in one operator or several."""
    dividend, tensor = division.inputs[:2]
    for _ in range(len(_NORM_STEPS)):
        node = model.producer.get(tensor)
        if node is None or not is_default(node):
            return False
        if node.op_type in _NORM_SOURCES or node.op_type == "ReduceSumSquare":
            return node.inputs[0] == dividend
        if node.op_type == "Mul" and set(node.inputs) == {dividend}:
            return True
        if node.op_type == "Pow" and node.inputs[0] == dividend:
            return True
        if node.op_type not in _NORM_STEPS:
            return False
        tensor = next((name for name in node.inputs if name not in model.constants), "")
    return False
