"""Schemes: the Q/DQ pairs of one region, relative to its pattern, to transfer placements between regions and models.

A scheme is independent of models. A `Frame` maps the places of a pattern to a region of a model; `schemes_of` and
`placement_of` convert placements to schemes and back. An edge, a tensor and the input that reads it, is of the leaf
of its reader. If a tensor leaves the leaf that makes it, quantized for all readers, the producer's leaf has it too, so
that each of both leaves can be transferred alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple, TypeAlias, cast

from qdqspec.errors import PlacementError
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import is_commutative
from qdqspec.graph.regions import PatternGranularity, PatternMaker, flow_of
from qdqspec.qdq.formats import BIAS_FORMAT
from qdqspec.types import Consumer, Placement, Region, Site

PlaceKind: TypeAlias = Literal["in", "out", "result"]


class PatternPlace(NamedTuple):
    """A place in a pattern, by the canonical index of a node and a slot of it.

    ``in``: that input of the node. ``out``: that output, for all readers. ``result``: that output as an output
    of the model; ignored where it is not one.
    """

    kind: PlaceKind
    node: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RelativeSite:
    """A pair at a place, like `qdqspec.types.Site` without names."""

    place: PatternPlace
    format: str
    axis: int = -1  # -1: one scale for the whole tensor
    weight: bool = False

    def __str__(self) -> str:
        kind, node, slot = self.place
        axis = f"/{self.axis}" if self.axis >= 0 else ""
        return f"{kind}{node}.{slot}={'w:' if self.weight else ''}{self.format}{axis}"


_WRITTEN = re.compile(
    r"(in|out|result)([0-9]{1,9})\.([0-9]{1,9})=(w:)?([a-z][a-z0-9_]{0,31})(?:/([0-9]{1,3}))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The pairs of one region. Equal sites are the same scheme, in any order."""

    sites: frozenset[RelativeSite] = frozenset()

    def __str__(self) -> str:
        """``in0.0=uint8 in0.1=w:int8/0 out2.0=uint8``; `parse_scheme` is the inverse."""
        return " ".join(map(str, sorted(self.sites)))

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def parse_scheme(text: str) -> Scheme:
    """The scheme of a text from ``str``. Raises `PlacementError` quoting the word that is not a site."""
    sites = []
    for word in text.split():
        match = _WRITTEN.fullmatch(word)
        if match is None:
            raise PlacementError(
                f"'{word[:60]}' is not a site", cure="a site is written like in0.1=w:int8/0 or out3.0=uint8"
            )
        kind, node, slot, weight, fmt, axis = match.groups()
        site = RelativeSite(
            place=PatternPlace(cast("PlaceKind", kind), int(node), int(slot)),
            format=fmt,
            axis=-1 if axis is None else int(axis),
            weight=weight is not None,
        )
        sites.append(site)
    return Scheme(sites=frozenset(sites))


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
        self.of = cache(self._make_frame)
        self.place = cache(self._find_place)

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that partition the model."""
        return tuple(region for region in self.regions.values() if not region.children)

    @cached_property
    def leaf_of(self) -> dict[str, str]:
        """The leaf of each node, by name."""
        return {node: region.id for region in self.leaves for node in region.nodes}

    def _make_frame(self, region_id: str) -> Frame:
        """The frame of a region."""
        region, by_name = self.regions[region_id], self.model.by_name
        pattern = self._maker.make(by_name[name].index for name in region.nodes)
        position = {name: i for i, name in enumerate(pattern.order)}
        return Frame(region=region, pattern=pattern.digest, order=pattern.order, position=position)

    def _find_place(self, end: Consumer) -> tuple[str, PatternPlace]:
        """The leaf of an input, and its place there. Raises `PlacementError` if no leaf has it."""
        if end.node not in self.leaf_of:
            raise PlacementError(f"node '{end.node}' is in no region", where=self.model.where)
        frame = self.of(self.leaf_of[end.node])
        # Its own slot, unless operands may be swapped.
        slot = self.slots_of(frame, self.model.by_name[end.node]).index(end.input)
        return frame.region.id, PatternPlace("in", frame.position[end.node], slot)

    @cached_property
    def _maker(self) -> PatternMaker:
        return PatternMaker(flow_of(self.model), self._granularity)

    def slots_of(self, frame: Frame, node: Node) -> tuple[int, ...]:
        """The inputs of a node, as indexes in canonical order."""
        inputs = range(len(node.inputs))
        if not is_commutative(node, self.model.opset):
            return tuple(inputs)
        return tuple(sorted(inputs, key=lambda i: (self._rank(frame, node.inputs[i]), i)))

    def _rank(self, frame: Frame, tensor: str) -> tuple[object, ...]:
        """Sort key of an operand that is the same in all regions of the pattern: its producer, or its readers."""
        maker = self.model.producer.get(tensor)
        if maker is not None and maker.name in frame.position:
            return 0, frame.position[maker.name], maker.outputs.index(tensor)
        ends = self.model.consumers.get(tensor, ())
        readers = sorted(frame.position[end.node] for end in ends if end.node in frame.position)
        elem_type, dims = self.model.elem_type(tensor), self.model.shape(tensor) or ()
        shape = tuple(-1 if dim is None else dim for dim in dims)
        return (
            1,
            tensor in self.model.constants,
            -1 if elem_type is None else elem_type,
            shape,
            tuple(readers),
        )


def schemes_of(frames: Frames, placement: Placement) -> dict[str, Scheme]:
    """The scheme of each leaf, by region id; leaves that stay float have an empty one.

    A site has a place at each edge, and at the producer's output if all consumers read the tensor quantized. A pair on
    an output of a body of If, Loop or Scan is in no scheme, since no region has that output. Raises `PlacementError` if
    a site names a node that is in no region.
    """
    model = frames.model
    found: dict[str, set[RelativeSite]] = {region.id: set() for region in frames.leaves}
    for site in placement.sites:
        ends = [end for end in site.consumers if not end.is_output]
        readers = {e for e in ends if e.node not in model.by_name or not model.by_name[e.node].is_marker}
        places = [frames.place(end) for end in readers]
        maker = model.producer.get(site.tensor)
        if maker is not None and not site.weight and maker.name in frames.leaf_of:
            frame = frames.of(frames.leaf_of[maker.name])
            slot = frame.position[maker.name], maker.outputs.index(site.tensor)
            if len(ends) < len(site.consumers):
                places.append((frame.region.id, PatternPlace("result", *slot)))
            is_whole = bool(readers) and readers == set(model.consumers[site.tensor])
            if is_whole and site.tensor in frame.region.outputs:
                places.append((frame.region.id, PatternPlace("out", *slot)))
        axis = -1 if site.axis is None else site.axis
        for region_id, place in places:
            relative = RelativeSite(place=place, format=site.format, axis=axis, weight=site.weight)
            found[region_id].add(relative)
    return {region_id: Scheme(sites=frozenset(sites)) for region_id, sites in found.items()}


def placement_of(frames: Frames, schemes: Mapping[str, Scheme]) -> Placement:
    """The placement of schemes, given by the ids of leaves.

    Edges of one tensor with equal formats become one site, except that each int32 bias has its own scale. If two
    schemes contain one edge, the reader's takes precedence over the producer's. Raises `PlacementError` if a scheme
    does not fit its region.
    """
    edges: dict[Consumer, tuple[str, RelativeSite]] = {}
    for kinds in (("out", "result"), ("in",)):
        for region_id, chosen in schemes.items():
            frame = frames.of(region_id)
            for site in sorted(site for site in chosen.sites if site.place.kind in kinds):
                found = find_ends(frames, frame, site.place)
                if found is None:
                    raise PlacementError(
                        f"the scheme's site {site} is not in region {region_id} of {len(frame.order)} nodes",
                        where=frames.model.where,
                        cure="a scheme fits the regions of its own pattern only",
                    )
                edges |= {end: (tensor, site) for tensor, end in found}
    groups: dict[tuple[object, ...], list[Consumer]] = {}
    for end, (tensor, one) in edges.items():
        own = end if one.format == BIAS_FORMAT else None
        groups.setdefault((tensor, one.format, one.axis, one.weight, own), []).append(end)
    sites = []
    for ends in groups.values():
        tensor, one = edges[ends[0]]
        axis = None if one.axis < 0 else one.axis
        made = Site(tensor=tensor, consumers=tuple(ends), format=one.format, axis=axis, weight=one.weight)
        sites.append(made)
    return Placement(sites=frozenset(sites))


def find_ends(frames: Frames, frame: Frame, place: PatternPlace) -> list[tuple[str, Consumer]] | None:
    """The edges at a place of a region; ``None`` if there is no such place."""
    model = frames.model
    if place.node >= len(frame.order):
        return None
    node = model.by_name[frame.order[place.node]]
    if place.kind in ("out", "result"):
        tensor = node.outputs[place.slot] if place.slot < len(node.outputs) else ""
        wanted = place.kind == "result"
        return [(tensor, end) for end in model.ends(tensor) if end.is_output == wanted] if tensor else None
    slots = frames.slots_of(frame, node)
    if place.slot >= len(slots) or not node.inputs[slots[place.slot]]:
        return None
    return [(node.inputs[slots[place.slot]], Consumer(node.name, slots[place.slot]))]
