"""Parts of a model: their inputs and outputs, their results, and their Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.observe import with_outputs
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.excerpt import Excerpt, Excerpts
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.search_space import SchemeSpace

Array = np.ndarray


def values_in(model: Model, feeds: Mapping[str, Array], tensors: tuple[str, ...]) -> dict[str, Array]:
    made = [tensor for tensor in tensors if tensor not in feeds]
    proto = with_outputs(model, made).proto
    seen = (
        dict(zip((o.name for o in proto.graph.output), outputs_of(proto, feeds), strict=True)) if made else {}
    )
    return {tensor: feeds[tensor] if tensor in feeds else seen[tensor] for tensor in tensors}


def cut(model: Model, nodes: list[str], feeds: Mapping[str, Array], path: Path) -> tuple[Excerpt, dict]:
    shapes = {name: value.shape for name, value in feeds.items()}
    excerpts = Excerpts(model, shapes, path)
    values = values_in(model, feeds, excerpts.inputs(nodes))
    return excerpts.cut(nodes, values), values


def thirds(model: Model) -> list[list[str]]:
    names = [node.name for node in model.nodes]
    size = -(-len(names) // 3)
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_a_part_computes_the_tensors_of_the_whole_model(models: Path, name: str) -> None:
    model = load_model(models / f"{name}.onnx")
    feeds = random_inputs(model, seed=1)
    for nodes in thirds(model):
        part, values = cut(model, nodes, feeds, model.path)
        results = tuple(part.readers)
        assert results
        expected = values_in(model, feeds, results)
        outputs = outputs_of(part.model, {tensor: values[tensor] for tensor in part.inputs})
        found = dict(zip(part.model.outputs, outputs, strict=True))
        for tensor in results:
            given = found[part.readers[tensor].node]
            np.testing.assert_allclose(given, expected[tensor], rtol=1e-3, atol=1e-4)


def test_dynamic_shapes_are_taken_from_the_values() -> None:
    model = parsed("g (float[n, 4] x) => (float[n, 4] y) { [a] t = Relu(x)  [b] u = Neg(t)  [c] y = Abs(u) }")
    part, _ = cut(model, ["b"], {"x": np.ones((3, 4), np.float32)}, Path())
    assert (part.model.shape("t"), part.model.shape("u")) == ((3, 4), (3, 4))


def test_a_computed_shape_is_a_constant_of_the_part() -> None:
    model = parsed(
        """g (float[2, 6] x) => (float[3, 4] y) {
            [s] like = Shape(x)  [d] shape = Add(like, k)  [r] h = Reshape(x, shape)  [o] y = Relu(h) }""",
        k=np.array([1, -2], np.int64),
    )
    part, _ = cut(model, ["r"], {"x": np.ones((2, 6), np.float32)}, Path())
    assert part.inputs == ("x",)
    assert part.model.array("shape").tolist() == [3, 4]


def test_nodes_of_a_part_have_the_generated_names_of_unnamed_nodes() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { a = Relu(x)  b = Relu(a)  y = Relu(b) }")
    part, _ = cut(model, ["Relu#1"], {"x": np.ones(2, np.float32)}, Path())
    assert part.model.nodes[0].name == "Relu#1"
    assert all(not node.name for node in model.proto.graph.node)


@pytest.mark.parametrize("label", ["in+out", "in-only"])
def test_a_part_has_the_pairs_of_its_nodes(models: Path, tmp_path: Path, label: str) -> None:
    model = load_model(models / "digits_resnet.onnx")
    space = SchemeSpace(model, backend().capabilities())
    unit = next(unit for unit in space.units if label in unit.labels)
    placement = space.resolve({unit.id: label})
    part, values = cut(model, list(unit.nodes), random_inputs(model, seed=0), model.path)
    restricted = part.restricted(placement)
    assert {site.tensor for site in restricted.sites} == {site.tensor for site in placement.sites}
    own = {*unit.nodes, *(end.node for end in part.readers.values())}
    assert {end.node for site in restricted.sites for end in site.consumers} <= own
    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    store = WeightStore(tmp_path, base=models)
    save_model(Inserter(part.model, numbers, store=store).insert(restricted).proto, tmp_path / "part.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "part.onnx", providers=["CPUExecutionProvider"])
    session.run(None, {tensor: values[tensor] for tensor in part.inputs})
