"""Sites are matched in a model with other names of tensors and nodes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import rename_tensors
from qdqspec.qdq.scheme.match import Matcher, positions
from qdqspec.types import Consumer, Site


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
