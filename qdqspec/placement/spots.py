"""Positions of Q/DQ pairs in a model and the changes there, in columns for all pairs together.

So a candidate takes a few operations on whole columns instead of several for each of tens of thousands of
pairs. Positions in the model are numbers.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqspec.graph.wire import Piece
from qdqspec.placement.biases import CorrectedBias
from qdqspec.types import Site

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """The additions of a site to a model. ``nodes`` and ``constants`` are fields of the graph.

    ``integer`` is the stored weight if there is one. It can replace the float weight if the chosen inserts
    cover all its ``readers``; this one covers ``covered`` of them.
    """

    site: Site
    nodes: bytes
    constants: bytes
    integer: TensorProto | None
    stored: Piece  # the integers as an initializer
    output: str
    opset: int
    covered: int
    readers: int
    makes_output: bool  # of the graph
    foreign: bool  # whether operators of domain ``trt`` are among the nodes
    bias: CorrectedBias | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A slot of a template and the number of the piece in it under an insert. For nodes, the input and its new text."""

    slot: int
    piece: int
    input: int = -1
    text: bytes = b""


class Spots:
    """Positions of inserts in a template and their changes, by number. Pieces are given by number too."""

    def __init__(self) -> None:
        self._anchors = array("q")
        self._nodes = array("q")
        self._constants = array("q")
        self._foreign = array("b")
        self._partial: dict[int, Partial] = {}
        # Numbers of positions with one of the ends that read each, and with slot and piece of one of its
        # changes.
        self._ends = array("q")
        self._slots = array("q")
        self._changes: list[Change] = []

    def add(
        self,
        anchor: int,
        *,
        nodes: int,
        constants: int,
        foreign: bool,
        ends: Iterable[int],
        changes: Iterable[Change],
    ) -> int:
        """A new number, for an insert before node ``anchor``."""
        number = len(self._anchors)
        self._anchors.append(anchor)
        self._nodes.append(nodes)
        self._constants.append(constants)
        self._foreign.append(foreign)
        for end in ends:
            self._ends.extend((number, end))
        for change in changes:
            self._slots.extend((number, change.slot, change.piece))
            self._changes.append(change)
        return number

    def add_partial(self, number: int, partial: Partial) -> None:
        """Register an insert whose stored weight covers only some readers."""
        self._partial[number] = partial

    def overlap(self, spots: Numbers) -> bool:
        """Whether two of these positions are for one input."""
        ends = np.asarray(self._ends).reshape(-1, 2)
        read = ends[self._chosen(spots)[ends[:, 0]], 1]
        return len(read) > 0 and int(np.bincount(read).max()) > 1

    def changes(self, spots: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The changes of each of these positions: slots in order, their pieces, and the numbers of the changes."""
        slots = np.asarray(self._slots).reshape(-1, 3)
        rows = np.flatnonzero(self._chosen(spots)[slots[:, 0]])
        rows = rows[np.argsort(slots[rows, 1], kind="stable")]
        return slots[rows, 1], slots[rows, 2], rows

    def _chosen(self, spots: Numbers) -> npt.NDArray[np.bool_]:
        chosen = np.zeros(len(self._anchors), np.bool_)
        chosen[spots] = True
        return chosen

    def slot(self, change: int) -> int:
        """The slot of a change."""
        return self._changes[change].slot

    def texts(self, changes: Iterable[int]) -> list[tuple[int, bytes]]:
        """Inputs of a node, and their texts after these changes."""
        return [(change.input, change.text) for change in map(self._changes.__getitem__, changes)]

    def partial(self, numbers: Iterable[int]) -> tuple[list[Change], list[int]]:
        """Changes if several inserts cover a stored weight together, and weights to store beside the float ones.

        Of the inserts of a weight the first in the graph takes its place, because stripping finds that one
        first.
        """
        chosen = [number for number in numbers if number in self._partial] if self._partial else []
        covered: Counter[str] = Counter()
        for one in map(self._partial.__getitem__, chosen):
            covered[one.insert.site.tensor] += one.insert.covered
        changes: list[Change] = []
        beside: list[int] = []
        for number in sorted(chosen, key=self._anchors.__getitem__):
            one = self._partial[number]
            if covered.pop(one.insert.site.tensor, 0) == one.insert.readers:
                changes += one.instead
            else:
                beside.append(one.stored)
        return changes, beside

    def added(self, spots: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The positions of nodes, the nodes, and the constants."""
        return (
            np.asarray(self._anchors)[spots],
            np.asarray(self._nodes)[spots],
            np.asarray(self._constants)[spots],
        )

    def any_foreign(self, spots: Numbers) -> bool:
        """Whether any of these positions adds operators of domain ``trt``."""
        return bool(np.asarray(self._foreign)[spots].any())


@dataclass(frozen=True, slots=True)
class Partial:
    """An insert whose stored weight alone does not replace the float one, and the changes when it does."""

    insert: Insert
    stored: int
    instead: tuple[Change, ...]
