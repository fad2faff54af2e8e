"""Lint rules for kernels with dynamic quantization, and the behaviour of ONNX Runtime that they state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.read.strip import strip_qdq


def _model(largest: int = 60, *, shared_scales: bool = False, reads_cast: bool = False) -> Model:
    """A model with two products of one tensor."""
    random = np.random.default_rng(0)
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "quantize")]
    constants = []
    for name in "ab":
        scale = "scale" if shared_scales else f"scale_{name}"
        weights = random.integers(-largest, largest + 1, (8, 4)).astype(np.int8)
        weights[0, 0] = largest
        constants.append(numpy_helper.from_array(weights, f"w{name}"))
        if not any(constant.name == scale for constant in constants):
            constants.append(numpy_helper.from_array(random.random(4).astype(np.float32), scale))
        nodes += [
            helper.make_node("MatMulInteger", ["q", f"w{name}", "z"], [f"i{name}"], name),
            helper.make_node("Cast", [f"i{name}"], [f"f{name}"], f"cast_{name}", to=TensorProto.FLOAT),
            helper.make_node("Mul", ["s", scale], [f"s{name}"], f"scales_{name}"),
            helper.make_node("Mul", [f"f{name}", f"s{name}"], [f"y{name}"], f"scaled_{name}"),
        ]
    nodes.append(helper.make_node("Sub", ["ya", "fa" if reads_cast else "yb"], ["y"], "sub"))
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])]
    graph = helper.make_graph(nodes, "g", ends, outputs, constants)
    return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


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
