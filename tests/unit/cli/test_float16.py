"""Verbs on a float16 model for a backend without integer kernels for pairs of float16 tensors."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from tests.support.half_models import in_float16

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[4,16] x) => (float[4,16] y) {
    a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, w) }"""
REPORTED = (
    "the model computes in float16, and the backend has no integer kernels for pairs of float16 tensors"
)


def test_the_conversion_is_reported(verb, tmp_path):
    proto = onnx.parser.parse_model(TEXT)
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight / 4, "w"))
    onnx.save(in_float16(proto), tmp_path / "half.onnx")
    for word in ("inspect", "explain"):
        result = verb(word, "half.onnx")
        assert result.code == 0, result.err
        assert REPORTED in " ".join(result.out.split())
    for backend in ("onnxruntime", "fake"):
        assert verb("init", "half.onnx", "--backend", backend, "-o", f"{backend}.qdq.yaml").code == 0
        text = " ".join((tmp_path / f"{backend}.qdq.yaml").read_text().replace("#", "").split())
        assert (REPORTED in text) is (backend == "onnxruntime")
        assert "can run in integers: MatMul 2" in text
        assert "kind: speedup" in text
