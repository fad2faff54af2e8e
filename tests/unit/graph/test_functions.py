"""Inlining of local functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx_text import outputs_of

from qdqspec.graph.given import given_model, inlined
from qdqspec.graph.model import Model

TEXT = """<ir_version: 8, opset_import: ["": 17, "my": 1]>
g (float[n,4] x, bool c) => (float[n,4] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}> {
  [call_a] a = my.f<alpha = 0.5>(x)
  [call_b] b = my.f<alpha = 0.25>(a)
  v = If (c) < then_branch = yes () => (t) { t = my.f<alpha = 0.125>(b) }, else_branch = no () => (e) { e = Neg(b) } >
  y = Mul(v, w)
}
<domain: "my", opset_import: ["": 17, "my": 1]> f <alpha>(x) => (y) {
  [leak] t = LeakyRelu<alpha: float = @alpha>(x)
  [inner] y = my.h(t)
}
<domain: "my", opset_import: ["": 17]> h (x) => (y) { [sig] s = Sigmoid(x)  y = Mul(x, s) }"""


X = {"x": np.float32([[1, -2, 3, -4]]), "c": np.array(True)}


def test_calls_are_replaced_with_unique_names_in_bodies_too() -> None:
    proto = onnx.parser.parse_model(TEXT)
    flat = inlined(proto)
    onnx.checker.check_model(flat, full_check=True)
    assert not flat.functions
    names = [node.name for node in Model(flat).nodes]
    assert len(names) == len(set(names))
    plain = [name for name in names if not name.endswith(("inputs", "_branch"))]
    assert plain[:6] == [
        "call_a/leak", "call_a/inner/sig", "call_a/inner/Mul#1",
        "call_b/leak", "call_b/inner/sig", "call_b/inner/Mul#1",
    ]  # fmt: skip
    assert plain[6] == "If#6/then_branch/f#0/leak"
    assert [node.name for node in Model(inlined(proto)).nodes] == names
    assert flat.graph.initializer == proto.graph.initializer
    np.testing.assert_array_equal(outputs_of(flat, X)[0], outputs_of(proto, X)[0])


def test_a_function_for_an_operator_of_a_runtime_is_not_inlined() -> None:
    proto = onnx.parser.parse_model(TEXT.replace('"my"', '"trt"').replace("my.", "trt."))
    assert inlined(proto) is proto


def test_a_function_of_another_opset_version_is_not_inlined() -> None:
    proto = onnx.parser.parse_model(
        TEXT.replace('"my", opset_import: ["": 17]> h', '"my", opset_import: ["": 13]> h')
    )
    flat = inlined(proto)
    assert [f.name for f in flat.functions] == ["h"]
    assert [node.name for node in flat.graph.node][:2] == ["call_a/leak", "call_a/inner"]
    assert flat.graph.node[1].op_type == "h"


def test_a_case_tunes_the_inlined_copy_with_a_note(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "calls.onnx")
    model = given_model(tmp_path / "calls.onnx", {})
    assert model.notes == ("2 local functions are inlined in a copy of the model",)
    assert model.where == str(tmp_path / "calls.onnx")
