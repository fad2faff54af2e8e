"""Conversions between schemes and placements of any model are inverse."""

from __future__ import annotations

from collections import Counter

from changed_models import renamed_and_reordered
from hypothesis import given, strategies as st
from random_models import onnx_models, placements

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.region_schemes import Frames, parse_scheme, placement_of, schemes_of
from qdqspec.qdq.search_space import SchemeSpace, project
from qdqspec.types import Label, Placement, QuantizeRules, RegionRules

CAPABILITIES = backend().capabilities()


@st.composite
def labelled_spaces(draw: st.DrawFn) -> tuple[SchemeSpace, Placement]:
    """A model divided into regions of any size, and a placement of its space."""
    model = Model(draw(onnx_models(max_nodes=12)))
    rules = RegionRules(max_nodes=draw(st.integers(1, 12)))
    asked = QuantizeRules(outputs=draw(st.booleans()))
    space = SchemeSpace(model, CAPABILITIES, rules=asked, regions=find_regions(model, rules))
    labels: dict[str, Label] = {unit.id: draw(st.sampled_from(unit.labels)) for unit in space.units}
    return space, space.resolve(labels)


@given(labelled_spaces())
def test_a_placement_is_recovered_from_the_text_of_its_schemes(drawn: tuple[SchemeSpace, Placement]) -> None:
    space, placement = drawn
    frames = Frames(space.model, space.regions)
    schemes = schemes_of(frames, placement)
    read = {region: parse_scheme(str(scheme)) for region, scheme in schemes.items()}
    assert placement_of(frames, read) == placement


@given(labelled_spaces())
def test_the_projection_of_a_placement_of_the_space_is_itself(drawn: tuple[SchemeSpace, Placement]) -> None:
    space, placement = drawn
    assert project(space, placement).digest == placement.digest


@given(st.data())
def test_schemes_keep_the_format_of_every_edge(data: st.DataObject) -> None:
    """This includes placements outside the search space; only sites of one tensor and one format are merged.

    A pair that produces an output of a body is in no scheme.
    """
    model = Model(data.draw(onnx_models(max_nodes=10)))
    placement = data.draw(placements(model))
    frames = Frames(model, find_regions(model, RegionRules(max_nodes=data.draw(st.integers(1, 8)))))
    found = placement_of(frames, schemes_of(frames, placement))
    body_outputs = {node.name for node in model.nodes if node.is_marker}
    assert edges_of(found) == {edge for edge in edges_of(placement) if edge[1] not in body_outputs}


def edges_of(placement: Placement) -> set[tuple[object, ...]]:
    return {
        (site.tensor, *end, site.format, site.axis, site.weight)
        for site in placement.sites
        for end in site.consumers
    }


@given(labelled_spaces(), st.randoms(use_true_random=False))
def test_schemes_are_independent_of_node_order_and_names(drawn, random) -> None:
    """Symmetric nodes may be exchanged, so the numbers of equal schemes are compared."""
    space, placement = drawn
    copy = Model(renamed_and_reordered(space.model.proto, random))
    limit = RegionRules(max_nodes=max(len(r.nodes) for r in space.regions if not r.children))
    ours, theirs = find_regions(space.model, limit), find_regions(copy, limit)
    one, other = Frames(space.model, ours), Frames(copy, theirs)
    assert [region.pattern for region in ours] == [region.pattern for region in theirs]
    schemes = schemes_of(one, placement)
    carried = schemes_of(other, placement_of(other, schemes))
    assert counted(one, schemes) == counted(other, carried)


def counted(frames: Frames, schemes: dict[str, object]) -> Counter[tuple[str, str]]:
    return Counter((frames.of(region).pattern, str(scheme)) for region, scheme in schemes.items())
