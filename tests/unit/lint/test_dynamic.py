"""Lint rules for kernels with dynamic quantization, and the behaviour of ONNX Runtime that they state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from trt_corpus import parse

from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.read.strip import strip_qdq


def _model(largest: int = 60, *, shared_scales: bool = False, reads_cast: bool = False) -> Model:
    """A model with two products of one tensor."""
    random = np.random.default_rng(0)
    constants = {}
    text = "[quantize] qx, qs, qz = DynamicQuantizeLinear(x) "
    for name in "ab":
        scale = "scale" if shared_scales else f"scale_{name}"
        weights = random.integers(-largest, largest + 1, (8, 4)).astype(np.int8)
        weights[0, 0] = largest
        constants |= {f"w{name}": weights, scale: random.random(4).astype(np.float32)}
        text += f"[{name}] i{name} = MatMulInteger(qx, w{name}, qz)  f{name} = Cast<to = 1>(i{name}) "
        text += f"s{name} = Mul(qs, {scale})  y{name} = Mul(f{name}, s{name}) "
    text += f"y = Sub(ya, {'fa' if reads_cast else 'yb'})"
    return parse("float[2,8] x", "y", text, 17, **constants)


def _findings(model: Model) -> set[str]:
    return {finding.id for finding in lint_model(model, "onnxruntime-cpu")}


def _runs(model: Model, folder: Path) -> set[str]:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    data = model.proto.SerializeToString()
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node}


def test_a_product_with_separate_scales_is_fused(tmp_path: Path) -> None:
    assert not {"ORT013", "ORT015"} & _findings(_model())
    assert "MatMulInteger" not in _runs(_model(), tmp_path)


@pytest.mark.parametrize("fault", ["shared_scales", "reads_cast"])
def test_a_product_that_is_not_fused_is_slow(fault: str, tmp_path: Path) -> None:
    model = _model(**{fault: True})
    assert "ORT015" in _findings(model)
    assert "MatMulInteger" in _runs(model, tmp_path)


def test_weights_of_8_bits_may_saturate() -> None:
    assert "ORT013" in _findings(_model(largest=127))


def test_a_convolution_in_integers_is_not_fused(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(models / "digits_resnet.onnx", path, weight_type=QuantType.QUInt8)
    quantized = load_model(path)
    assert [f.node for f in lint_model(quantized, "onnxruntime-cpu") if f.id == "ORT016"] == [
        node.name for node in quantized.nodes if node.op_type == "ConvInteger"
    ]
    assert {"ConvInteger", "Cast", "Mul", "Add", "Relu"} <= _runs(quantized, tmp_path)
    assert "ORT016" not in _findings(Model(strip_qdq(quantized).proto))
