"""``quantize.dq_dtype``: outputs of plugin operators, whose type the model does not declare, are quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from graph_text import saved
from onnx import TensorProto

from qdqspec.app.session import Session
from qdqspec.graph.model import load_model
from qdqspec.qdq.scheme_file import apply_scheme, read_scheme

MODEL = """g (float16[1, 8, 8] x) => (float16[1, 8, 8] y) {
    [a] a = plugins.Rotate(x)  [b] b = plugins.Rotate(a)  [m] c = MatMul(a, b)  [n] d = MatMul(c, b)
    [e] y = plugins.Rotate(d) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "scales.json").write_text(json.dumps(dict.fromkeys("abcd", 2.0)))
    return saved(tmp_path / "plugin.onnx", MODEL)


def exported(model: Path, **asked: Any) -> tuple[Path, Path]:
    """The model with everything quantized, and its scheme."""
    given = {"scales": model.with_name("scales.json"), "min_sqnr_db": "none", **asked}
    with (
        Session(backend="fake", root=model.parent, no_cache=True) as session,
        session.study(model, **given) as study,
    ):
        everything = study.space.resolve(study.space.everything())
        return (
            study.export(model.with_name("tuned.onnx"), everything),
            study.export(model.with_name("scheme.json"), everything),
        )


@pytest.mark.parametrize(
    ("dq_dtype", "elem_type"), [("float16", TensorProto.FLOAT16), ("float32", TensorProto.FLOAT)]
)
def test_scales_and_outputs_have_the_given_type(model: Path, dq_dtype: str, elem_type: int) -> None:
    path, scheme = exported(model, dq_dtype=dq_dtype)
    tuned = load_model(path)
    dequantizers = [node for node in tuned.nodes if node.op_type == "DequantizeLinear"]
    assert len(dequantizers) == 4
    assert {tuned.elem_type(node.outputs[0]) for node in dequantizers} == {elem_type}
    assert {tuned.constants[node.inputs[1]].data_type for node in dequantizers} == {elem_type}
    assert read_scheme(scheme).dq_dtype == dq_dtype
    applied = apply_scheme(load_model(model), scheme).proto
    assert list(applied.graph.node) == list(tuned.proto.graph.node)


def test_outputs_of_plugins_are_not_quantized_without_a_given_type(model: Path) -> None:
    path, scheme = exported(model)
    assert not any(node.op_type == "DequantizeLinear" for node in load_model(path).nodes)
    assert "dq_dtype" not in json.loads(scheme.read_text())
