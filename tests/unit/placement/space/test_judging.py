"""The reasons printed by `inspect` for nodes that are not offered, each with a model that has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx_text import parsed

from qdqspec._core.registry import resolve
from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.judging import NOT_ASKED, judge
from qdqspec.types import QuantizeRules

IMAGE = "float[1,4,6,6]"
BACKEND = resolve("backend", "onnxruntime")().capabilities()


def model_of(text: str, **constants: object) -> Model:
    return parsed(text, named=True, w=(4, 4, 1, 1), **constants)


def reasons(model: Model, can: Capabilities = BACKEND, **rules: bool) -> dict[str, str]:
    return dict(judge(model, can, backend="any", rules=QuantizeRules(**rules)).reasons)


SHAPED = f"({IMAGE} x) => ({IMAGE} y)"
CHOICE = f"({IMAGE} x, bool c) => ({IMAGE} y)"
BRANCHES = f"""then_branch = t () => ({IMAGE} u) {{ u = Neg(z) }},
               else_branch = e () => ({IMAGE} v) {{ v = Abs(x) }}"""
TYPED = "Add: no floating point input of 16 or 32 bits"
SCALED = "Add: one of its constants is empty, infinite or not a number, so that it has no scale"
REASONS = [
    (f"({IMAGE} x) => (float[4] y, {IMAGE} z)", "s = Shape(x) f = Cast<to = 1>(s) y = Mul(f, f) z = Neg(x)", "y",
     "computed from shapes or constants alone"),
    (SHAPED, "y = mine.Conv(x, w)", "y", "mine:Conv: an operator that the backend does not know"),
    (SHAPED, "y = Tanh(x)", "y", "Tanh: the backend runs it in floating point only"),
    (f"({IMAGE} x) => (double[1,4,6,6] y)", "y = Cast<to = 11>(x)", "y", "Cast: never quantized by itself"),
    (SHAPED, "a = Conv(x, w) b = Relu(a) y = Neg(b)", "b", "Relu: quantized together with the operator before it"),
    ("(int64[4] x) => (int64[4] y)", "y = Add(x, x)", "y", TYPED),
    ("(double[4] x) => (double[4] y)", "y = Add(x, x)", "y", TYPED),
    ("(float[4] x) => (y)", "a = mine.Odd(x) b = Reshape(a, x) y = Neg(b)", "b", "Reshape: element type not known"),
    (f"({IMAGE} x, float[4,4,1,1] v) => ({IMAGE} y)", "a = Conv(x, v) y = Neg(a)", "a",
     "Conv: its weight is computed, and integer kernels need a constant one"),
    (f"{SHAPED} <float[0] none = {{}}>", "a = Add(x, none) y = Neg(a)", "a", SCALED),
    (SHAPED, "a = Conv(x, w) y = Neg(x)", "a", "Conv: no node reads its output"),
    ("(float[1] x, float[4] v) => (float[4] y)", "a = Add(x, x) y = Clip(v, a)", "a",
     "Add: its output is read as a bound, a scale or a shape"),
    (f"({IMAGE} x, int64 at, int64 by) => (int64[n] y, {IMAGE} z)",
     "a = Conv(x, w) b = ReduceMax<keepdims = 0>(a) c = Cast<to = 7>(b) y = Range(at, c, by) z = Neg(a)", "a",
     "its values set the size of a tensor, which quantization would change"),
    (CHOICE, f"a = Conv(x, w) z = Relu(a) y = If (c) <{BRANCHES}>", "a",
     "Conv: a body of If, Loop or Scan reads its output"),
    (CHOICE, f"z = Neg(x) y = If (c) <{BRANCHES}>", "y",
     "If: control flow; the nodes of its bodies count by themselves"),
    (SHAPED, "y = Sigmoid(x)", "y", f"Sigmoid: it makes a graph output, and {NOT_ASKED}"),
]  # fmt: skip


@pytest.mark.parametrize(("ports", "nodes", "node", "reason"), REASONS)
def test_the_reason_why_a_node_is_not_offered(ports: str, nodes: str, node: str, reason: str) -> None:
    assert reasons(model_of(f"g {ports} {{ {nodes} }}"))[node] == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"g ({IMAGE} y) => ({IMAGE} y, {IMAGE} z) {{ z = Neg(y) }}", "no node computes it"),
        (f"g ({IMAGE} x) => (int64[4] y) {{ y = Shape(x) }}", "it holds INT64"),
        (
            f"g ({IMAGE} x) => ({IMAGE} y) {{ y = Tanh(x) }}",
            "Tanh: the backend runs it in floating point only",
        ),
        (f"g ({IMAGE} x) => ({IMAGE} y) {{ a = Conv(x, w) y = Relu(a) }}", ""),
        (f"g ({IMAGE} x) => ({IMAGE} y) {{ a = Mul(x, x) y = Relu(a) }}", NOT_ASKED),
    ],
    ids=["input", "integers", "float operator", "function after a convolution", "function"],
)
def test_the_reason_why_a_graph_output_is_not_offered(text: str, reason: str) -> None:
    assert judge(model_of(text), BACKEND, backend="any").outputs["y"] == reason


def test_judging_folds_batch_normalization_as_tuning_does() -> None:
    """Unnamed nodes are matched although folding changes their numbers."""
    model = model_of(
        f"""g ({IMAGE} x) => ({IMAGE} y) {{ a = Conv(x, w) b = BatchNormalization(a, s, s, s, s)
            c = Conv(b, w) y = Tanh(c) }}""",
        s=np.ones(4, np.float32),
    )
    for node in model.proto.graph.node:
        node.name = ""
    assert reasons(Model(model.proto)) == {
        "Conv#0": "",
        "BatchNormalization#1": "BatchNormalization: folded into the operator before it",
        "Conv#2": "",
        "Tanh#3": "Tanh: the backend runs it in floating point only",
    }


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "trtexec", "fake"])
def test_judging_needs_no_installed_backend(backend: str, models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    found = judge(model, resolve("backend", backend)().capabilities(), backend=backend)
    assert found.reasons["/layer2/layer2.0/conv2/Conv"] == ""
    small = backend in ("tensorrt", "trtexec")  # ten columns, one for each class
    assert found.outputs == {"logits": "Gemm: rule small-gemm leaves it in float" if small else NOT_ASKED}


def test_a_product_of_two_activations_is_not_offered_where_the_weight_must_be_constant() -> None:
    model = model_of(
        "g (float[4,4] x) => (float[4,4] y) <float[4,4] v = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}> "
        "{ a = MatMul(x, v) y = MatMul(a, a) }"
    )
    can = replace(BACKEND, constant_weight=frozenset({"MatMul"}))
    assert reasons(model)["y"] == ""
    assert reasons(model, can) == {
        "a": "",
        "y": "MatMul: its weight is computed, and integer kernels need a constant one",
    }
