"""Verbs on a float16 model for a backend without integer kernels for pairs of float16 tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.support.changed_models import in_float16

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[4,16] x) => (float[4,16] y) {
    a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, w) }"""
REPORTED = (
    "the model computes in float16, and the backend has no integer kernels for pairs of float16 tensors"
)


@pytest.fixture
def half(tmp_path):
    proto = onnx.parser.parse_model(TEXT)
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight / 4, "w"))
    onnx.save(in_float16(proto), tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


@pytest.mark.parametrize("word", ["inspect", "explain"])
def test_the_conversion_is_reported(verb, half, word):
    result = verb(word, half)
    assert result.code == 0, result.err
    assert REPORTED in " ".join(result.out.split())


def test_init_reports_the_conversion_and_the_operators_that_run_in_integers(verb, half, tmp_path):
    assert verb("init", half).code == 0
    text = " ".join((tmp_path / "half.qdq.yaml").read_text().replace("#", "").split())
    assert REPORTED in text
    assert "onnxruntime-cpu can run in integers: MatMul 2" in text
    assert "kind: speedup" in text
    assert verb("init", half, "--backend", "fake", "-o", "fake.qdq.yaml").code == 0
    assert REPORTED not in " ".join((tmp_path / "fake.qdq.yaml").read_text().replace("#", "").split())
