"""The placement of labels does not depend on earlier calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from onnx_text import parsed

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import PlacementError
from qdqspec.graph.model import load_model
from qdqspec.qdq.space.search_space import SchemeSpace


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
    model = parsed(f"g (float[2,2] x) => ({outputs}) {{ [r] t = Relu(x) {nodes} }}", w=(2, 2))
    space = SchemeSpace(model, OnnxRuntime().capabilities())
    some = {f"m{i}": "in-only" for i in range(0, readers, 2)}
    (read,) = (site for site in space.resolve(some).sites if site.tensor == "t")
    assert {end.node for end in read.consumers} == some.keys()


def test_an_unknown_unit_or_label_is_an_error_with_the_valid_ones(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), OnnxRuntime().capabilities())
    conv = next(unit for unit in space.units if unit.op_type == "Conv")
    with pytest.raises(PlacementError, match="is no unit that can be labelled") as unknown:
        space.resolve({conv.id + "x": "in+out"})
    assert f"did you mean '{conv.id}'" in str(unknown.value)
    with pytest.raises(PlacementError, match=r"cannot be 'in-only'(.|\n)*it can be fp, in\+out"):
        space.resolve({conv.id: "in-only"})
