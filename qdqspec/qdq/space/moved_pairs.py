"""The edges whose pair reaches an operator: some runtimes move pairs past operators that only move values."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import data_inputs
from qdqspec.qdq.space.units import Edge
from qdqspec.types import Consumer


def edges_before(model: Model, edge: Edge, moved_past: Collection[str]) -> Iterator[Edge]:
    """The edge, and those before operators that pairs are moved past until they are on it."""
    waiting, known = [edge], {edge}
    while waiting:
        yield (edge := waiting.pop())
        node = model.producer.get(edge[0])
        if node is not None and node.op_type in moved_past:
            before = data_edges(model, node)
            waiting += [found for found in before if found not in known]
            known.update(before)


def data_edges(model: Model, node: Node) -> list[Edge]:
    """The edges of activations that a node reads."""
    inputs = ((node.inputs[index], Consumer(node.name, index)) for index in data_inputs(node))
    return [edge for edge in inputs if edge[0] not in model.constants]


def edges_after(model: Model, edge: Edge, moved_past: Collection[str]) -> Iterator[Edge]:
    """The edge, and those after operators that pairs are moved past until they are on it: with one reader each."""
    yield edge
    end = edge[1]
    while not end.is_output and end.input == 0 and (node := model.by_name[end.node]).op_type in moved_past:
        ends = model.ends(node.outputs[0])
        if len(ends) != 1:
            return
        (end,) = ends
        yield node.outputs[0], end
