"""Converts placements to schemes relative to patterns and back, to transfer them between models.

An edge (a tensor and the input that reads it) belongs to the leaf of its reader. If a tensor leaves the leaf
that makes it, quantized for all readers, the producer's leaf has it too, so that each of both leaves can be
transferred alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qdqspec.errors import PlacementError
from qdqspec.placement.frames import Frame, Frames
from qdqspec.placement.relative import PatternPlace, RelativeSite, Scheme, scheme
from qdqspec.quantize.formats import BIAS_FORMAT
from qdqspec.types import Consumer, Placement, Site


class _Numbers(NamedTuple):
    """The properties that sites must share to be merged."""

    format: str
    axis: int
    weight: bool


def schemes_of(frames: Frames, placement: Placement) -> dict[str, Scheme]:
    """The scheme of each leaf, by region id; leaves that stay float have an empty one.

    A pair on an output of a body of If, Loop or Scan is in no scheme, since no region has that output. Raises
    `PlacementError` if a site names a node that is in no region.
    """
    found: dict[str, set[RelativeSite]] = {region.id: set() for region in frames.leaves}
    for site in placement.sites:
        for region_id, place in _places(frames, site):
            axis = -1 if site.axis is None else site.axis
            relative = RelativeSite(place=place, format=site.format, axis=axis, weight=site.weight)
            found[region_id].add(relative)
    return {region_id: scheme(sites) for region_id, sites in found.items()}


def _places(frames: Frames, site: Site) -> Iterator[tuple[str, PatternPlace]]:
    """The places of a site: each edge, and the producer's output if all consumers read the tensor quantized."""
    model = frames.model
    nodes = {end for end in site.consumers if not end.is_output}
    readers = {end for end in nodes if end.node not in model.by_name or not model.by_name[end.node].is_marker}
    for end in readers:
        yield frames.place(end)
    maker = model.producer.get(site.tensor)
    if maker is None or site.weight or maker.name not in frames.leaf_of:
        return
    frame = frames.of(frames.leaf_of[maker.name])
    slot = frame.position[maker.name], maker.outputs.index(site.tensor)
    if len(nodes) < len(site.consumers):
        yield frame.region.id, PatternPlace("result", *slot)
    if readers and site.tensor in frame.region.outputs and readers == set(model.consumers[site.tensor]):
        yield frame.region.id, PatternPlace("out", *slot)


def placement_of(frames: Frames, schemes: Mapping[str, Scheme]) -> Placement:
    """The placement of schemes, given by the ids of leaves.

    Edges of one tensor with equal formats become one site. If two schemes contain one edge, the reader's takes
    precedence over the producer's. Raises `PlacementError` if a scheme does not fit its region.
    """
    edges: dict[Consumer, tuple[str, _Numbers]] = {}
    for kinds in (("out", "result"), ("in",)):
        for region_id, chosen in schemes.items():
            for site in sorted(site for site in chosen.sites if site.place.kind in kinds):
                for tensor, end in _ends(frames, frames.of(region_id), site):
                    edges[end] = tensor, _Numbers(site.format, site.axis, site.weight)
    return Placement(sites=frozenset(_merged(edges)))


def _merged(edges: Mapping[Consumer, tuple[str, _Numbers]]) -> Iterator[Site]:
    """One site per tensor and format; each int32 bias has its own scale."""
    groups: dict[tuple[object, ...], list[Consumer]] = {}
    for end, (tensor, numbers) in edges.items():
        own = end if numbers.format == BIAS_FORMAT else None
        groups.setdefault((tensor, numbers, own), []).append(end)
    for ends in groups.values():
        tensor, numbers = edges[ends[0]]
        axis = None if numbers.axis < 0 else numbers.axis
        yield Site(
            tensor=tensor, consumers=tuple(ends), format=numbers.format, axis=axis, weight=numbers.weight
        )


def _ends(frames: Frames, frame: Frame, site: RelativeSite) -> list[tuple[str, Consumer]]:
    """The edges of a relative site in a region."""
    ends = find_ends(frames, frame, site.place)
    if ends is None:
        raise PlacementError(
            f"the scheme's site {site} is not in region {frame.region.id} of {len(frame.order)} nodes",
            where=frames.model.where,
            cure="a scheme fits the regions of its own pattern only",
        )
    return ends


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
    index = frames.input(frame, node.name, place.slot)
    if index is None or not node.inputs[index]:
        return None
    return [(node.inputs[index], Consumer(node.name, index))]
