"""Frames: the mapping of the places of a pattern to one region of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_commutative
from qdqspec.placement.relative import PatternPlace
from qdqspec.regions.flow import flow_of
from qdqspec.regions.pattern import PatternGranularity, PatternMaker
from qdqspec.types import Consumer, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A region with its nodes in the canonical order of its pattern."""

    region: Region
    pattern: str  # digest, in the granularity of the frames
    order: tuple[str, ...]
    position: Mapping[str, int]


class Frames:
    """The frames of a model's regions, each computed on first use.

    With ``granularity="structure"``, regions that differ in shapes only share their patterns.
    """

    def __init__(
        self, model: Model, regions: Iterable[Region], granularity: PatternGranularity = "structure+shapes"
    ) -> None:
        self.model = model
        self.regions = {region.id: region for region in regions}
        self._granularity = granularity
        self._made: dict[str, Frame] = {}
        self._slots: dict[tuple[str, str], tuple[int, ...]] = {}
        self._places: dict[Consumer, tuple[str, PatternPlace]] = {}

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that partition the model."""
        return tuple(region for region in self.regions.values() if not region.children)

    @cached_property
    def leaf_of(self) -> dict[str, str]:
        """The leaf of each node, by name."""
        return {node: region.id for region in self.leaves for node in region.nodes}

    def of(self, region_id: str) -> Frame:
        """The frame of a region."""
        if region_id not in self._made:
            region, by_name = self.regions[region_id], self.model.by_name
            pattern = self._maker.make(by_name[name].index for name in region.nodes)
            self._made[region_id] = Frame(
                region=region,
                pattern=pattern.digest,
                order=pattern.order,
                position={name: i for i, name in enumerate(pattern.order)},
            )
        return self._made[region_id]

    def place(self, end: Consumer) -> tuple[str, PatternPlace]:
        """The leaf of an input, and its place there. Raises `PlacementError` if no leaf has it."""
        if end not in self._places:
            if end.node not in self.leaf_of:
                raise PlacementError(f"node '{end.node}' is in no region", where=self.model.where)
            frame = self.of(self.leaf_of[end.node])
            # Its own slot, unless operands may be swapped.
            slot = self._slots_of(frame, self.model.by_name[end.node]).index(end.input)
            self._places[end] = frame.region.id, PatternPlace("in", frame.position[end.node], slot)
        return self._places[end]

    def input(self, frame: Frame, node: str, slot: int) -> int | None:
        """The input at a canonical slot; ``None`` if the node has none there."""
        slots = self._slots_of(frame, self.model.by_name[node])
        return slots[slot] if slot < len(slots) else None

    @cached_property
    def _maker(self) -> PatternMaker:
        return PatternMaker(flow_of(self.model), self._granularity)

    def _slots_of(self, frame: Frame, node: Node) -> tuple[int, ...]:
        """The inputs of a node, as indexes in canonical order."""
        inputs = range(len(node.inputs))
        if not is_commutative(node, self.model.opset):
            return tuple(inputs)
        key = frame.region.id, node.name
        if key not in self._slots:
            self._slots[key] = tuple(sorted(inputs, key=lambda i: (self._rank(frame, node.inputs[i]), i)))
        return self._slots[key]

    def _rank(self, frame: Frame, tensor: str) -> tuple[object, ...]:
        """Sort key of an operand that is the same in all regions of the pattern: its producer, or its readers."""
        maker = self.model.producer.get(tensor)
        if maker is not None and maker.name in frame.position:
            return 0, frame.position[maker.name], maker.outputs.index(tensor)
        ends = self.model.consumers.get(tensor, ())
        readers = sorted(frame.position[end.node] for end in ends if end.node in frame.position)
        known = self.model.types.get(tensor)
        shape = (
            () if known is None or known.shape is None else tuple(-1 if d is None else d for d in known.shape)
        )
        return 1, tensor in self.model.constants, known.elem_type if known else -1, shape, tuple(readers)
