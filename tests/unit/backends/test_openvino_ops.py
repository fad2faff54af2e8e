"""Verifies the operator table against the installed OpenVINO: one small model per entry, and the precision of its
kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from openvino_installed import require_openvino
from operator_models import IMAGE, MATRIX, ONE, RANDOM, Graph, conv, indices, layers_of, runs_in_integers

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.openvino import engine as table
from qdqspec.backends.openvino.engine import OpenVino


@pytest.fixture(autouse=True)
def installed() -> None:
    require_openvino()


Maker = Callable[[Graph, str], str]

# op type -> the operator on quantized inputs, for those that the table of ONNX Runtime does not have
MORE: dict[str, Maker] = {
    "GlobalMaxPool": lambda g, x: g.node("GlobalMaxPool", x),
    "ReduceMax": lambda g, x: g.node("ReduceMax", x, indices(g, 2, 3)),
    "ReduceMean": lambda g, x: g.node("ReduceMean", x, indices(g, 2, 3)),
    "ReduceSum": lambda g, x: g.node("ReduceSum", x, indices(g, 2, 3)),
}
# those that are computed in the kernel of a convolution, or of operands of the same kind
JOINED: dict[str, Maker] = {
    "Add": lambda g, x: g.node("Add", g.pair(conv(g, x)), g.pair(conv(g, x))),
    "Mul": lambda g, x: squeeze_and_excitation(g, x),
    "Sub": lambda g, x: g.node("Sub", g.pair(conv(g, x)), g.pair(conv(g, x))),
}
ABSORBED: dict[str, Maker] = {
    **{op: (lambda g, x, op=op: g.node(op, x)) for op in table.ABSORBED},
    "BatchNormalization": lambda g, x: g.node(
        "BatchNormalization", x, *(g.const(np.full(8, v), np.float32) for v in (1.1, 0.2, 0.1, 1.3))
    ),
    "Clip": lambda g, x: g.node("Clip", x, g.const(0, np.float32), g.const(6, np.float32)),
    "PRelu": lambda g, x: g.node("PRelu", x, g.const(np.full((8, 1, 1), 0.1), np.float32)),
}


def squeeze_and_excitation(g: Graph, x: str) -> str:
    y = g.pair(conv(g, x))
    gate = g.node("Sigmoid", g.node("GlobalAveragePool", y))
    return g.node("Mul", y, g.pair(gate, zero=0, scale=1 / 255))


def integer(model: onnx.ModelProto, op: str, folder: Path) -> bool:
    return runs_in_integers(OpenVino(), model, folder, op)


def build_one(op: str, make: Maker, *, out: bool) -> onnx.ModelProto:
    g = Graph()
    outputs = [make(g, g.input(MATRIX if op in ("Gemm", "MatMul") else IMAGE)), *g.others]
    return g.model(*(g.pair(y) if out else y for y in outputs))


@pytest.mark.parametrize(
    ("op", "out"), [(op, kind == "in+out") for op in sorted(table.LABELS) for kind in table.LABELS[op]]
)
def test_an_operator_runs_in_integers_under_each_of_its_labels(tmp_path: Path, op: str, out: bool) -> None:
    assert integer(build_one(op, {**ONE, **MORE, **JOINED}[op], out=out), op, tmp_path)


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("GatherElements", ONE["GatherElements"]),
        ("Tile", ONE["Tile"]),
        ("Pad", lambda g, x: g.node("Pad", x, indices(g, 0, 0, 1, 1, 0, 0, 1, 1))),
        ("Mul", lambda g, x: g.node("Mul", g.pair(conv(g, x)), g.pair(conv(g, x)))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_not_offered_and_exceptions_run_in_float(tmp_path: Path, op: str, make: Maker) -> None:
    """See also the tests of the lint rules OVC013 to OVC015."""
    assert not integer(build_one(op, make, out=True), op, tmp_path)


@pytest.mark.parametrize("op", sorted(table.ABSORBED))
def test_operators_that_a_convolution_absorbs_are_computed_in_its_kernel(tmp_path: Path, op: str) -> None:
    """The kernel of the convolution includes the operator and writes integers; no other kernel computes."""
    g = Graph()
    y = ABSORBED[op](g, conv(g, g.input(IMAGE)))
    model = g.model(conv(g, g.pair(y, zero=100)), opset=20)
    computing = [layer for layer in layers_of(OpenVino(), model, tmp_path) if not layer.boundary]
    assert [layer.op_type for layer in computing] == ["Convolution", "Convolution"]
    first = computing[0]
    assert first.precision == "uint8"
    assert {node.op_type for node in model.graph.node if node.name in first.nodes} == {"Conv", op}


@pytest.mark.parametrize("bias", ["float", "int32"])
@pytest.mark.parametrize("op", ["Conv", "Gemm"])
def test_any_bias_is_added_in_integers(tmp_path: Path, op: str, bias: str) -> None:
    g = Graph()
    channels = 8 if op == "Conv" else 16
    rest = g.const(RANDOM.uniform(-1, 1, channels), np.float32) if bias == "float" else g.bias(channels)
    if op == "Conv":
        y = conv(g, g.input(IMAGE), rest)
    else:
        y = g.node("Gemm", g.input(MATRIX), g.weight(32, 16, axis=1), rest)
    assert integer(g.model(y), op, tmp_path)


@pytest.mark.parametrize("zero", [0, 128])
@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
def test_products_are_exact_with_the_weights_that_are_offered(tmp_path: Path, op: str, zero: int) -> None:
    """With the largest activations, and 7-bit weights where the processor needs them: no sum saturates."""
    bound = 63 if OpenVino().capabilities().reduce_range else 127
    g = Graph()
    shape, kernel = ((1, 64, 4, 4), (8, 64, 3, 3)) if op == "Conv" else ((4, 256), (256, 16))
    weight = g.full(*kernel, axis=0 if op == "Conv" else 1, value=bound)
    model = g.model(g.node(op, g.input(shape, zero=zero), weight), opset=19)
    feeds = {"x0": np.full(shape, 9, np.float32)}
    onnx.save(model, tmp_path / "m.onnx")
    (result,) = OpenVino().build(tmp_path / "m.onnx", BuildOptions()).run(feeds).values()
    (expected,) = ReferenceEvaluator(model).run(None, dict(feeds))
    np.testing.assert_allclose(result, expected, rtol=1e-4)
