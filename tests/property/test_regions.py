"""Properties of the regions, patterns and region schemes of any model."""

from __future__ import annotations

from collections import Counter

import numpy as np
from changed_models import renamed_and_reordered
from hypothesis import given, strategies as st
from onnx_text import parsed
from random_models import onnx_models, placements

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.graph.regions.expressions import matched_nodes, parse
from qdqspec.graph.regions.inspect import find_bodies
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.region_schemes import Frames, parse_scheme, placement_of, schemes_of
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Label, Placement, QuantizeRules, Region, RegionRules
from tests.support.patterns import matches

UNARY = ("Relu", "Sigmoid", "Identity", "Conv", "Shape")
BINARY = ("Add", "Sub", "Mul")


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> list[tuple[str, tuple[int, ...]]]:
    """Operators with the indices of their producers; -1 and -2 are the graph inputs."""
    rows: list[tuple[str, tuple[int, ...]]] = []
    for index in range(draw(st.integers(1, most))):
        op = draw(st.sampled_from((*UNARY, *BINARY, "Split", "Constant")))
        floats = [i for i in range(-2, index) if i < 0 or rows[i][0] != "Shape"]
        arity = 2 if op in BINARY else 0 if op == "Constant" else 1
        rows.append((op, tuple(draw(st.sampled_from(floats)) for _ in range(arity))))
    return rows


def model_of(rows: list[tuple[str, tuple[int, ...]]]) -> Model:
    """The graph of these rows; node ``i`` makes ``ti``."""
    made = {-2: "x", -1: "z"} | {index: f"t{index}" for index in range(len(rows))}
    more = {"Split": "<axis = 3>", "Constant": f"<value = float[1,4,2,2] {{{', '.join(['0.5'] * 16)}}}>"}
    text = ""
    for index, (op, feeds) in enumerate(rows):
        inputs = [made[feed] for feed in feeds] + (["w"] if op == "Conv" else [])
        outputs = made[index] + (f", s{index}" if op == "Split" else "")
        text += f"[n_{index}] {outputs} = {op}{more.get(op, '')}({', '.join(inputs)}) "
    used = {feed for _, feeds in rows for feed in feeds}
    results = [made[i] for i in range(len(rows)) if i not in used] or [made[len(rows) - 1]]
    image = "float[1,4,2,2]"
    return parsed(
        f"g ({image} x, {image} z) => ({', '.join(results)}) {{ {text} }}",
        13,
        w=np.full((4, 4, 1, 1), 0.1, "f4"),
    )


def leaves(regions: tuple[Region, ...]) -> list[Region]:
    return [region for region in regions if region.type == "LEAF"]


@given(graphs(), st.integers(1, 12))
def test_leaves_are_a_strict_partition_and_the_tree_is_consistent(rows, max_nodes):
    model = model_of(rows)
    regions = find_regions(model, RegionRules(max_nodes=max_nodes))
    everything = [n.name for n in model.nodes if n.op_type != "Constant" and not n.is_marker]
    assert sorted(name for leaf in leaves(regions) for name in leaf.nodes) == sorted(everything)
    by_id = {region.id: region for region in regions}
    assert len(by_id) == len(regions)
    for region in regions:
        below = [name for child in region.children for name in by_id[child].nodes]
        assert region.type == "LEAF" or sorted(below) == sorted(region.nodes)
        assert all(by_id[child].parent == region.id for child in region.children)
        assert (region.type == "ROOT") == (region.parent is None) == (region.id == "r0")


@given(graphs())
def test_inputs_and_outputs_of_a_region_are_the_tensors_that_cross_its_border(rows):
    model = model_of(rows)
    for region in find_regions(model, RegionRules(max_nodes=3)):
        inside = [model.by_name[name] for name in region.nodes]
        made = {t for node in inside for t in node.outputs}
        outer = [n for n in model.nodes if n.name not in region.nodes]
        read_outside = {t for node in outer for t in node.inputs} | set(model.outputs)
        constants = model.constants.keys()
        assert set(region.inputs) == {t for n in inside for t in n.inputs} - made - constants
        assert set(region.outputs) == made & read_outside


@given(
    onnx_models() | graphs().map(lambda rows: model_of(rows).proto),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_regions_do_not_depend_on_names_or_node_order(proto, max_nodes, chance):
    """Symmetric nodes may be exchanged, so the patterns by id are compared."""
    rules = RegionRules(max_nodes=max_nodes)
    one, other = (find_regions(Model(p), rules) for p in (proto, renamed_and_reordered(proto, chance)))
    assert [(r.id, r.type, r.children, r.pattern, r.pattern_text) for r in one] == [
        (r.id, r.type, r.children, r.pattern, r.pattern_text) for r in other
    ]


@given(onnx_models())
def test_no_leaf_has_nodes_of_two_graphs(proto):
    model = Model(proto)
    regions = find_regions(model)
    found = find_bodies(model, regions)
    assert all(len({model.by_name[name].scope for name in leaf.nodes}) == 1 for leaf in leaves(regions))
    attributes = [a for node in proto.graph.node for a in node.attribute if a.HasField("g")]
    assert len(found) == len(attributes)
    for body, attribute in zip(found, attributes, strict=True):
        below = [name for leaf in leaves(body.regions) for name in leaf.nodes]
        assert len(below) == len(set(below)) == body.nodes == len(attribute.g.node)


ITEMS = st.tuples(st.sampled_from(["Relu", "Add", "Conv", "*"]), st.sampled_from(["", "?", "*"]))
TURNS = st.lists(ITEMS.map(lambda item: f"({item[0]}){item[1]}"), min_size=1, max_size=4).map(" > ".join)


@given(graphs(most=7), st.lists(TURNS, min_size=1, max_size=2).map(" | ".join))
def test_matched_nodes_are_the_nodes_of_all_matches(rows, text):
    model, expression = model_of(rows), parse(text)
    listed = {name for match in matches(expression, model) for name in match}
    assert matched_nodes(expression, model) == listed


# ---- conversions between schemes and placements are inverse --------------------------------------


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
    assert space.project(placement)[0].digest == placement.digest


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
