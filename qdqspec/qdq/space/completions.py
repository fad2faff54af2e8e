"""Units that the runtime quantizes itself, since pairs are around them: which ones, for a set of edges with pairs.

Some runtimes move pairs past operators that only move values, so that a pair may be some operators away.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import data_inputs
from qdqspec.qdq.space.units import Edge
from qdqspec.types import Consumer


class Completions:
    """Choices by number, each with places that need a pair on one of several edges, and the edges of its constants."""

    def __init__(self) -> None:
        self._choices: list[int] = []
        self._places = array("q")  # the position of the choice of each place
        self._edges = array("q")  # pairs of a place and an edge
        self._constants = array("q")  # pairs of the position of a choice and an edge

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, choice: int, places: Iterable[Iterable[int]], constants: Iterable[int]) -> None:
        """Add a choice; ``places`` are the edges of which each place needs one."""
        position = len(self._choices)
        self._choices.append(choice)
        for edges in places:
            for edge in edges:
                self._edges.extend((len(self._places), edge))
            self._places.append(position)
        for edge in constants:
            self._constants.extend((position, edge))

    def of(self, covered: npt.NDArray[np.bool_]) -> list[int]:
        """The choices with a pair at each place, and a constant without one, for the edges that have pairs."""
        at, edges = np.asarray(self._edges).reshape(-1, 2).T
        is_met = np.zeros(len(self._places), np.bool_)
        is_met[at[covered[edges]]] = True
        around = np.ones(len(self._choices), np.bool_)
        around[np.asarray(self._places)[~is_met]] = False
        owners, constants = np.asarray(self._constants).reshape(-1, 2).T
        lacking = np.zeros(len(self._choices), np.bool_)
        lacking[owners[~covered[constants]]] = True
        return [self._choices[position] for position in np.flatnonzero(around & lacking).tolist()]


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
