"""Models in float16, of which one build reports the fusions of a runtime."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graph_text import saved

from qdqspec.backends.onnxruntime.optimize import half_model
from qdqspec.errors import ModelError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.ops import has_floats


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_the_float16_form_has_no_float32_tensor_and_keeps_node_names(models: Path, name: str):
    path = models / f"{name}.onnx"
    model = load_model(path)
    assert has_floats(model)
    half = half_model(model, path)
    onnx.checker.check_model(half, full_check=True)
    assert not has_floats(Model(half))
    assert {node.name for node in model.nodes} <= {node.name for node in half.graph.node}
    assert all(node.name for node in half.graph.node)


def test_casts_precede_their_readers(tmp_path: Path):
    """A Resize always reads float32 scales: the converter inserts casts around it."""
    text = """resize (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] scales = {1, 1, 2, 2}> {
        a = Relu(x)
        [resize] y = Resize(a, , scales)
    }"""
    model = load_model(saved(tmp_path / "m.onnx", text, opset=17, ir_version=8))
    half = half_model(model, tmp_path / "m.onnx")
    made = {value.name for value in half.graph.input} | {t.name for t in half.graph.initializer}
    for node in half.graph.node:
        assert {name for name in node.input if name} <= made, f"{node.name} reads what is not written yet"
        made.update(node.output)
    assert [node.name for node in half.graph.node if node.op_type != "Cast"] == ["Relu#0", "resize"]


def test_nodes_that_cannot_be_converted_are_reported(models: Path, monkeypatch: pytest.MonkeyPatch):
    from onnxruntime.transformers import float16

    path = models / "digits_resnet.onnx"
    monkeypatch.setattr(float16, "convert_float_to_float16", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelError, match="cannot be converted to float16: division by zero"):
        half_model(load_model(path), path)
