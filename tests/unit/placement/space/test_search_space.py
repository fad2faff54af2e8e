"""The placement of labels does not depend on earlier calls."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.quantize.formats import RUN_TIME
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Placement, Site


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_resolving_is_independent_of_the_order_of_labels_and_earlier_calls(models: Path, name: str) -> None:
    model = load_model(models / f"{name}.onnx")
    used, lots = SchemeSpace(model, OnnxRuntime().capabilities()), random.Random(name)
    for _ in range(8):
        labels = {unit.id: lots.choice(unit.labels) for unit in used.units}
        shuffled = dict(lots.sample(list(labels.items()), len(labels)))
        fresh = SchemeSpace(model, OnnxRuntime().capabilities()).resolve(labels)
        again = used.resolve(shuffled)
        assert again == fresh
        assert again.digest == fresh.digest
        assert again.labels == fresh.labels


@pytest.mark.parametrize("readers", [3, 62, 63, 70])
def test_a_tensor_may_have_many_readers(readers: int) -> None:
    nodes = " ".join(f"[m{i}] y{i} = MatMul(t, w)" for i in range(readers))
    outputs = ", ".join(f"float[2,2] y{i}" for i in range(readers))
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]>'
        f"g (float[2,2] x) => ({outputs}) <float[2,2] w = {{1, 2, 3, 4}}> {{ [r] t = Relu(x) {nodes} }}"
    )
    space = SchemeSpace(Model(proto), OnnxRuntime().capabilities())
    some = {f"m{i}": "in-only" for i in range(0, readers, 2)}
    (read,) = (site for site in space.resolve(some).sites if site.tensor == "t")
    assert {end.node for end in read.consumers} == some.keys()


def test_a_space_of_fewer_tensors_never_quantizes_the_excluded_one(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), OnnxRuntime().capabilities())
    everything = space.resolve(space.everything())
    smaller = space.known([t for t in space.tensors if t != sorted(space.tensors)[0]])
    missing = sorted(space.tensors)[0]
    assert any(site.tensor == missing for site in everything.sites)
    sites = smaller.resolve(smaller.everything()).sites
    assert not any(site.tensor == missing and site.format != RUN_TIME for site in sites)


def test_an_unknown_unit_or_label_is_an_error_with_the_valid_ones(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), OnnxRuntime().capabilities())
    conv = next(unit for unit in space.units if unit.op_type == "Conv")
    with pytest.raises(PlacementError, match="is no unit that can be labelled") as unknown:
        space.resolve({conv.id + "x": "in+out"})
    assert f"did you mean '{conv.id}'" in str(unknown.value)
    with pytest.raises(PlacementError, match=r"cannot be 'in-only'(.|\n)*it can be fp, in\+out"):
        space.resolve({conv.id: "in-only"})


def test_sites_are_equal_for_any_order_of_consumers() -> None:
    one, other = (
        Site(tensor="t", consumers=ends, format="uint8")
        for ends in ((("b", 1), ("a", 0)), (("a", 0), ("b", 1)))
    )
    assert one == other
    assert hash(one) == hash(other)
    assert Placement(sites=frozenset({one, other})).pairs == 1
    assert Site(tensor="t", consumers=(("a", 0),), format="uint8") != one
