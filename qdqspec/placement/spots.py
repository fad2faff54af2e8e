"""Where Q/DQ pairs go in a model and what they change there, in columns for all pairs together.

So a candidate takes a few steps over whole columns, and not many for each of tens of thousands of pairs. May import
floors 0 to 2, numpy and onnx. Knows nothing of the model but its places by number.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqspec.types import Site

Piece: TypeAlias = bytes | TensorProto  # some of a model as it is written, or one initializer
Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """What a site adds to a model. ``nodes`` and ``constants`` are fields of the graph.

    ``integer`` is the stored weight where there is one. It can stand in the place of the float weight once the
    inserts chosen cover all its ``readers``; this one covers ``covered`` of them.
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
    foreign: bool  # whether operators of TensorRT's domain are among the nodes


@dataclass(frozen=True, slots=True)
class Change:
    """A piece of a template that is another one under an insert. Of nodes, which input reads what then."""

    slot: int
    piece: Piece
    input: int = -1
    text: bytes = b""


class Spots:
    """Where inserts go in a template and what they change there, by their numbers."""

    def __init__(self) -> None:
        self._anchors = array("q")
        self._foreign = array("b")
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self._partial: dict[int, tuple[Insert, tuple[Change, ...]]] = {}
        # Numbers of spots with one of the ends that read each, and with one of the slots that each changes.
        self._ends = array("q")
        self._slots = array("q")
        self._changes: list[Change] = []
        self._changed: list[Piece] = []

    def add(
        self,
        insert: Insert,
        anchor: int,
        ends: Iterable[int],
        changes: Iterable[Change],
        instead: tuple[Change, ...],
    ) -> int:
        """A new number. ``instead`` is what else changes once all readers of a stored weight are covered."""
        number = len(self._anchors)
        self._anchors.append(anchor)
        self._foreign.append(insert.foreign)
        self._nodes.append(insert.nodes)
        self._constants.append(insert.constants)
        if insert.stored and insert.covered < insert.readers:
            self._partial[number] = insert, instead
        for end in ends:
            self._ends.extend((number, end))
        for change in changes:
            self._slots.extend((number, change.slot))
            self._changes.append(change)
            self._changed.append(change.piece)
        return number

    def overlap(self, spots: Numbers) -> bool:
        """Whether two of these spots are for one input."""
        ends = self._of(spots, self._ends)[0]
        return len(ends) > 0 and int(np.bincount(ends).max()) > 1

    def changes(self, spots: Numbers) -> tuple[Numbers, Numbers]:
        """What each of these spots changes by itself, by slots: these, and the numbers of the changes."""
        slots, changes = self._of(spots, self._slots)
        order = np.argsort(slots, kind="stable")
        return slots[order], changes[order]

    def _of(self, spots: Numbers, column: array[int]) -> tuple[Numbers, Numbers]:
        chosen = np.zeros(len(self._anchors), np.bool_)
        chosen[spots] = True
        pairs = np.asarray(column).reshape(-1, 2)
        rows = np.flatnonzero(chosen[pairs[:, 0]])
        return pairs[rows, 1], rows

    def pieces(self, changes: Numbers) -> list[Piece]:
        """What stands in the slots where only one of these changes is made."""
        return list(map(self._changed.__getitem__, changes.tolist()))

    def slot(self, change: int) -> int:
        """What a change is made in."""
        return self._changes[change].slot

    def texts(self, changes: Iterable[int]) -> list[tuple[int, bytes]]:
        """Inputs of a node, and what they say after these changes."""
        return [(change.input, change.text) for change in map(self._changes.__getitem__, changes)]

    def partial(self, numbers: Iterable[int]) -> tuple[list[Change], list[Piece]]:
        """What changes since several cover a stored weight together, and weights to be stored beside the float ones.

        Of the inserts of a weight the first in the graph takes its place: stripping meets that one first.
        """
        chosen = [number for number in numbers if number in self._partial] if self._partial else []
        covered: Counter[str] = Counter()
        for insert, _ in map(self._partial.__getitem__, chosen):
            covered[insert.site.tensor] += insert.covered
        changes: list[Change] = []
        beside: list[Piece] = []
        for number in sorted(chosen, key=self._anchors.__getitem__):
            insert, instead = self._partial[number]
            if covered.pop(insert.site.tensor, 0) == insert.readers:
                changes += instead
            else:
                beside.append(insert.stored)
        return changes, beside

    def added(self, numbers: Sequence[int], spots: Numbers) -> tuple[Numbers, list[bytes], list[bytes]]:
        """Where nodes go, the nodes, and the constants."""
        nodes, constants = (list(map(of.__getitem__, numbers)) for of in (self._nodes, self._constants))
        return np.asarray(self._anchors)[spots], nodes, constants

    def any_foreign(self, spots: Numbers) -> bool:
        """Whether any of these spots adds operators of TensorRT's domain."""
        return bool(np.asarray(self._foreign)[spots].any())
