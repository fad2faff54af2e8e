"""``import``, ``diff`` and ``fold``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.graph.model import load_model

DATA = Path(__file__).parents[2] / "data"
QAT = DATA / "digits_resnet_qat_qdq.onnx"


def test_import_strip_and_apply_give_the_same_model(verb, tmp_path) -> None:
    imported = verb("import", QAT, "-o", "scheme.json", "--json")
    assert imported.code == 0
    assert (imported.json["activations"], imported.json["weights"]) == (13, 15)
    assert imported.json["digest"] == json.loads((tmp_path / "scheme.json").read_text())["digest"]
    assert verb("strip", QAT, "-o", "float.onnx").code == 0
    assert verb("apply", "float.onnx", "scheme.json", "-o", "again.onnx").code == 0
    compared = verb("diff", QAT, "again.onnx")
    assert compared.code == 0, compared.out
    assert compared.out == "28 equal Q/DQ pairs; the float models are the same\n"


QUANTIZED_OPERATORS = {
    "QLinearConv": "QLinearConv(q, s, z, w, s, z, s, z)",
    "QGemm": "com.microsoft.QGemm(q, s, z, v, s, z, bias, s, z)",
}


@pytest.mark.parametrize("name", QUANTIZED_OPERATORS)
def test_strip_counts_what_it_removed_and_names_operators_that_it_keeps(verb, tmp_path, name) -> None:
    shape = "1,4,4,4" if name == "QLinearConv" else "4,4"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[{shape}] x) => (float[{shape}] y) {{
            f = QuantizeLinear(x, s, z)  e = DequantizeLinear(f, s, z)  a = Neg(e)
            q = QuantizeLinear(a, s, z)  [integers] c = {QUANTIZED_OPERATORS[name]}
            y = DequantizeLinear(c, s, z) }}"""
    )
    constants = {
        "s": np.float32(0.5), "z": np.uint8(128), "w": np.ones((4, 4, 1, 1), np.uint8), "v": np.ones((4, 4), np.uint8),
        "bias": np.zeros(4, np.int32),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    onnx.save(model, tmp_path / "net.onnx")
    stripped = verb("strip", "net.onnx", "-o", "float.onnx")
    assert "float.onnx: 1 dequantized tensor removed, 1 left" in stripped.out
    kept = f"operators that compute in integers themselves, {name}, 1: 'integers': left as they are"
    assert kept in stripped.out
    assert kept in verb("import", "net.onnx", "-o", "scheme.json").out
    again = verb("strip", "float.onnx", "-o", "again.onnx", "--json")
    assert (again.json["pairs"], again.json["left"]) == (0, 1)


def test_import_reports_its_assumptions(verb) -> None:
    result = verb("import", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx", "-o", "scheme.json")
    assert result.code == 0
    assert "note: a Relu was inserted where a zero point cuts off negative values" in result.out
    assert result.out.endswith("scheme.json: 25 activation and 32 weight pairs in it\n")


def test_diff_exits_with_1_if_models_differ(verb, models) -> None:
    original = models / "digits_resnet.onnx"
    result = verb("diff", original, QAT, "--json")
    assert result.code == 1
    assert result.json["same"] is False
    assert len(result.json["added"]) == 28
    cut, whole = verb("diff", original, QAT), verb("diff", original, QAT, "--verbose")
    assert cut.code == whole.code == 1
    assert "and 16 more" in cut.out
    assert len(whole.out.splitlines()) > len(cut.out.splitlines())


def test_fold_writes_a_smaller_model(verb, models, tmp_path) -> None:
    result = verb("fold", models / "ultraface_rfb320.onnx", "-o", "folded.onnx", "--json")
    assert result.code == 0
    assert result.json["folded"] > 0
    assert len(load_model(tmp_path / "folded.onnx").nodes) == result.json["nodes"] < 244
    assert "0 nodes folded" in verb("fold", "folded.onnx", "-o", "again.onnx").out
