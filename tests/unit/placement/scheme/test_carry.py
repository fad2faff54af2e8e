"""Placements are matched in other models, by names, positions and patterns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx_text import parsed

from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import rename_tensors
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.scheme.match import Matcher, positions
from qdqspec.qdq.scheme.relative import Frames, parse_scheme, placement_of, schemes_of
from qdqspec.qdq.space.search_space import SchemeSpace, labels_of
from qdqspec.types import Consumer, Placement, Region, RegionRules, Site

TWINS = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
    a = Conv(x, w)  b = Relu(a)  c = Conv(b, w)  d = Relu(c)  y = Softmax(d) }"""


def model_of(text: str) -> Model:
    return parsed(text, named=True, w=(4, 4, 1, 1))


def cut(model: Model, *groups: Sequence[str]) -> tuple[Region, ...]:
    return find_regions(model, RegionRules(by="manual", manual=tuple(map(tuple, groups))))


def leaf_with(regions: Sequence[Region], node: str) -> Region:
    return next(region for region in regions if not region.children and node in region.nodes)


def test_a_tensor_between_two_regions_is_in_the_schemes_of_both() -> None:
    model = model_of(TWINS)
    regions = cut(model, ["a", "b"], ["c", "d"])
    placement = Placement(sites=frozenset({Site(tensor="b", consumers=(Consumer("c", 0),), format="uint8")}))
    schemes = schemes_of(Frames(model, regions), placement)
    first, second = leaf_with(regions, "a").id, leaf_with(regions, "c").id
    assert {key: str(value) for key, value in schemes.items() if value.sites} == {
        first: "out1.0=uint8",
        second: "in0.0=uint8",
    }
    for key in (first, second):
        assert placement_of(Frames(model, regions), {key: schemes[key]}) == placement


def test_commutative_operands_are_matched_by_their_producers() -> None:
    model = model_of(
        """g (float[1,4,6,6] x) => (float[1,4,6,6] y, float[1,4,6,6] z) {
            a = Conv(x, w)  b = Relu(a)  p = Add(a, b)  y = Sigmoid(p)
            c = Conv(x, w)  d = Relu(c)  q = Add(d, c)  z = Sigmoid(q) }"""
    )
    regions = cut(model, ["a", "b", "p", "y"], ["c", "d", "q", "z"])
    one = Placement(sites=frozenset({Site(tensor="b", consumers=(Consumer("p", 1),), format="uint8")}))
    first, second = leaf_with(regions, "a"), leaf_with(regions, "c")
    assert first.pattern == second.pattern
    scheme = schemes_of(Frames(model, regions), one)[first.id]
    (site,) = placement_of(Frames(model, regions), {second.id: scheme}).sites
    assert (site.tensor, [end.node for end in site.consumers]) == ("d", ["q"])


@pytest.mark.parametrize("text", ["in9.0=uint8", "in0.7=uint8", "out0.3=uint8"])
def test_a_scheme_of_another_pattern_is_an_error(text: str) -> None:
    model = model_of(TWINS)
    regions = cut(model, ["a", "b"], ["c", "d"])
    with pytest.raises(PlacementError, match="is not in region"):
        placement_of(Frames(model, regions), {leaf_with(regions, "a").id: parse_scheme(text)})


@pytest.mark.parametrize(
    "text", ["in0=uint8", "in0.0", "at0.0=uint8", "in0.0=U8", "in0.0=uint8/", "in-1.0=uint8"]
)
def test_text_that_is_no_site_is_an_error(text: str) -> None:
    with pytest.raises(PlacementError, match="is not a site") as caught:
        parse_scheme(f"in0.0=uint8 {text}")
    assert f"'{text}'" in str(caught.value)


def test_a_half_quantized_operator_is_projected_to_float(models: Path) -> None:
    model = load_model(models / "squeezenet10.onnx")
    space = SchemeSpace(model, backend().capabilities(), regions=find_regions(model))
    everything = space.resolve(space.everything())
    conv = next(unit for unit in space.units if unit.op_type == "Conv")
    without = frozenset(s for s in everything.sites if not (s.weight and s.consumers[0].node == conv.id))
    labels = labels_of(space, Placement(sites=without))
    assert conv.id not in labels
    assert len(labels) == len(space.units) - 1


def renamed(model: Model) -> Model:
    """The model with every node and every inner tensor renamed."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    kept = {*model.inputs, *model.outputs, ""}
    new = {}

    def name(old: str) -> str:
        return old if old in kept else new.setdefault(old, f"t{len(new)}")

    for tensor in proto.graph.initializer:
        tensor.name = name(tensor.name)
    for index, node in enumerate(proto.graph.node):
        rename_tensors(node, name)
        node.name = f"n{index}"
    del proto.graph.value_info[:]
    return Model(proto)


def sites_of(model: Model) -> list[Site]:
    """One site for each activation that a node reads, and for each weight."""
    return [
        Site(
            tensor=tensor,
            consumers=(Consumer(node.name, index),),
            format="int8" if tensor in model.constants else "uint8",
            weight=tensor in model.constants,
        )
        for node in model.nodes
        for index, tensor in enumerate(node.inputs[:2])
    ]


@pytest.mark.parametrize("name", ["digits_resnet", "ultraface_rfb320", "squeezenet10"])
def test_every_site_of_a_renamed_model_is_found_by_position(name: str, models: Path) -> None:
    model = load_model(models / f"{name}.onnx")
    other = renamed(model)
    matcher = Matcher(other, positions(model))
    for site in (s for s in sites_of(model) if model.elem_type(s.tensor) == onnx.TensorProto.FLOAT):
        (found,) = matcher.find(site).sites
        old, new = model.by_name[site.consumers[0].node], other.by_name[found.consumers[0].node]
        assert (old.index, site.consumers[0].input) == (new.index, found.consumers[0].input)


def test_a_node_of_the_same_name_and_another_operator_does_not_match(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    site = next(site for site in sites_of(model) if site.weight)
    (end,) = site.consumers
    proto = onnx.ModelProto()
    proto.CopyFrom(renamed(model).proto)
    proto.graph.node[-1].name = end.node
    (found,) = Matcher(Model(proto), positions(model)).find(site).sites
    assert found.consumers == (Consumer(f"n{model.by_name[end.node].index}", end.input),)


def test_a_site_without_a_match_has_a_reason(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    (activation, *_) = sites_of(model)
    absent = Site(tensor="gone", consumers=(Consumer("gone", 0), Consumer("", 0)), format="uint8")
    assert Matcher(model).find(activation).sites == (activation,)
    assert Matcher(model).find(absent).reasons == (
        "the model has no output of that name",
        "the model has no node 'gone', and none in its position",
    )
