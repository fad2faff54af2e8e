"""Warnings about a model before any measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from odd import ODD_MODELS
from onnx_text import parsed
from onnxruntime.quantization import QuantType, quantize_dynamic

from qdqspec.graph.cautions import cautions
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.strip import strip_qdq

ODD = {odd.name: odd for odd in ODD_MODELS}
SAID = {
    "training-dropout": "its outputs are random ('Dropout#1')",
    "integer-operators": "integer operators with ranges found at run time are in it already ('MatMulInteger#0')",
    "pairs-already": "it contains Q/DQ already ('QuantizeLinear#0', 'DequantizeLinear#1')",
    "string-constant": "outputs that are no tensors of numbers are not compared: 'label'",
    "string-input": "outputs that are no tensors of numbers are not compared: 'y'",
    "sequence-output": "outputs that are no tensors of numbers are not compared: 'rows'",
}


@pytest.mark.parametrize("name", sorted(set(ODD) - {"no-nodes"}))
def test_an_unusual_property_is_reported_only_if_results_depend_on_it(name: str) -> None:
    said = "; ".join(cautions(Model(ODD[name].make())))
    assert said.startswith(SAID[name]) if name in SAID else said == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (  # models that make speech have such an input, and draw random numbers in inference too
            """g (float[1,4] x, float scale) => (float[1,4] y) { r = RandomNormalLike(x) n = Mul(r, scale)
            y = Add(x, n) }""",
            "or if an input scales the random numbers, give data where it is 0",
        ),
        (
            """g (float[1,2,4] x, float[4,12] w, float[12] b) => (float y) {
            [attention] y = com.microsoft.Attention<num_heads = 2>(x, w, b) }""",
            "an optimizer has fused its attentions ('attention'): the model before that step",
        ),
    ],
    ids=["scaled random numbers", "fused attention"],
)
def test_random_numbers_and_fused_attentions_are_noted(text: str, said: str) -> None:
    (found,) = cautions(parsed(text))
    assert said in found


@pytest.mark.parametrize(
    ("op_types", "said"),
    [
        (["MatMul"], "in it already ('/fc/Gemm_MatMul_quant')"),
        (["Conv"], "in it already ('/conv1/Conv_quant', "),
    ],
)
def test_a_model_of_quantize_dynamic_is_noted(
    models: Path, tmp_path: Path, op_types: list[str], said: str
) -> None:
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(
        models / "digits_resnet.onnx", path, op_types_to_quantize=op_types, weight_type=QuantType.QUInt8
    )
    (found,) = cautions(load_model(path))
    assert said in found
    assert "part of the reference and of each candidate" in found
    assert found.endswith("to search from the float model: qdqspec strip")
    assert list(cautions(Model(strip_qdq(load_model(path)).proto))) == []
