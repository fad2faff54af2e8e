"""Guiding tensors, at which the error that guides a search is measured: those before trailing operators that saturate.

After a Softmax, a Sigmoid or an ArgMax the quantization noise of single pairs is not additive, and more pairs may even
give a smaller error. Before it noise is additive, so that it can be attributed to pairs.
"""

from __future__ import annotations

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS, copies_values, is_default
from qdqspec.qdq.space.units import Edge
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


def guiding_outputs(model: Model) -> dict[str, tuple[Edge, ...]]:
    """For each graph output the edges before its trailing operators that saturate or select.

    Without such an operator that is the output itself. Trailing operators are followed backwards through those that
    only copy or convert values. A division by the norm of its own dividend counts as a normalization.
    """
    return {name: _edges_before(model, name) for name in dict.fromkeys(model.outputs)}


def _edges_before(model: Model, output: str) -> tuple[Edge, ...]:
    """The edges with floats before the trailing operators of an output; its own without one that saturates."""
    end = (output, model.output_ends[output])
    found, seen, pending, saturated = dict[Edge, None](), set[str](), [end], False
    while pending:
        edge = pending.pop()
        tensor = edge[0]
        node = None if tensor in model.constants else model.producer.get(tensor)
        operands = () if node is None else _operands(model, node)
        if node is None or not operands:
            found[edge] = None
        elif tensor not in seen:
            seen.add(tensor)
            saturated |= _saturates(model, node)
            pending += [(node.inputs[index], Consumer(node.name, index)) for index in operands]
    real = (edge for edge in found if model.elem_type(edge[0]) in FLOATS and edge[0] not in model.constants)
    return (tuple(real) if saturated else ()) or (end,)


def _operands(model: Model, node: Node) -> tuple[int, ...]:
    """The inputs through which a trailing operator is followed; empty for an operator that computes."""
    if _saturates(model, node):
        return _DATA.get(node.op_type, (0,))
    selects = is_default(node) and node.op_type in ("Cast", "Gather", "GatherND", "GatherElements")
    if copies_values(node) or selects:
        chosen = (0, 1) if node.op_type.startswith("Gather") else (0,)
        return tuple(i for i in chosen if i < len(node.inputs) and node.inputs[i] not in model.constants)
    return ()


def _saturates(model: Model, node: Node) -> bool:
    is_division = node.op_type == "Div" and is_default(node)
    return (is_default(node) and node.op_type in SATURATING) or (
        is_division and _is_normalization(model, node)
    )


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
