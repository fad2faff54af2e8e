"""Each lint rule for OpenVINO, and the behaviour of the installed version that the rule states."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from installed import require
from operator_models import IMAGE, MATRIX, Graph, conv, layers_of, runs_in_integers

from qdqspec.backends.openvino.engine import OpenVino
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model


def ids(proto: onnx.ModelProto) -> set[str]:
    return {finding.id for finding in lint_model(Model(proto), "openvino-cpu")}


@pytest.fixture(autouse=True)
def installed() -> None:
    require("openvino")


def with_constant(
    op: str, shape: tuple[int, ...], *, first: bool = False, behind: str = "Relu"
) -> onnx.ModelProto:
    """The operator on quantized data of a shape, and a constant with a pair."""
    g = Graph()
    data = (1, 8, 6, 6) if len(shape) != 2 else (4, 32)
    x = g.input(data)
    x = g.pair(conv(g, x) if behind == "Conv" else g.node(behind, x))
    constant = g.pair(g.const(g.random.random(shape), np.float32))
    return g.model(g.pair(g.node(op, *((constant, x) if first else (x, constant)))))


@pytest.mark.parametrize(
    ("proto", "refused"),
    [
        (with_constant("Add", IMAGE), True), (with_constant("Sub", IMAGE, first=True), True),
        (with_constant("Add", (6,)), True), (with_constant("Add", (8, 1, 1), behind="Conv"), True),
        (with_constant("Mul", (4, 32)), True), (with_constant("Sub", IMAGE), False),
        (with_constant("Add", (8, 1, 1)), False), (with_constant("Mul", (1, 8, 1, 1)), False),
        (with_constant("Add", ()), False),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_quantized_constant_that_does_not_build_is_refused(proto, refused, tmp_path) -> None:
    assert ("OVC001" in ids(proto)) == refused
    with pytest.raises(BackendError, match="out of range") if refused else nullcontext():
        layers_of(OpenVino(), proto, tmp_path)


def convolution(
    stored: type = np.int8, zero: int = 0, data: type = np.uint8, *, bare: bool = False
) -> onnx.ModelProto:
    """A Conv of quantized data; with ``bare`` its weight is float."""
    g = Graph()
    x = g.input(IMAGE, dtype=data, zero=100)
    values = g.random.integers(0, 60, (8, 8, 3, 3))
    if bare:
        return g.model(g.node("Conv", x, g.const(values, np.float32)))
    numbers = g.const(np.full(8, 0.01), np.float32), g.const(np.full(8, zero), stored)
    weight = g.node("DequantizeLinear", g.const(values, stored), *numbers, axis=0)
    return g.model(g.node("Conv", x, weight), opset=21)


def product(*, constant: bool) -> onnx.ModelProto:
    g = Graph()
    y = g.node("MatMul", g.input(MATRIX), g.weight(32, 16, axis=1) if constant else g.input((32, 16)))
    return g.model(g.pair(y))


def total(*, both: bool) -> onnx.ModelProto:
    g = Graph()
    side = conv(g, g.input(IMAGE))
    return g.model(g.pair(g.node("Add", g.pair(side) if both else side, g.input(IMAGE))))


def between(op: str, **attributes: object) -> onnx.ModelProto:
    g = Graph()
    x = g.input(IMAGE)
    more = {
        "ConvTranspose": lambda: [g.weight(8, 8, 3, 3, axis=1)],
        "Resize": lambda: ["", g.const([1, 1, 2, 2], np.float32)],
    }.get(op, list)()
    return g.model(g.pair(g.node(op, x, *more, **attributes)))


@pytest.mark.parametrize(
    ("name", "op", "bad", "good"),
    [
        ("OVC010", "Conv", convolution(np.uint8, 128), convolution()),
        ("OVC010", "Conv", convolution(zero=3), convolution()),
        ("OVC011", "Conv", convolution(data=np.uint16), convolution()),
        ("OVC012", "Conv", convolution(bare=True), convolution()),
        ("OVC013", "MatMul", product(constant=False), product(constant=True)),
        ("OVC014", "Add", total(both=False), total(both=True)),
        ("OVC015", "Softmax", between("Softmax", axis=-1), None),
        ("OVC015", "ConvTranspose", between("ConvTranspose"), None),
        ("OVC015", "Resize", between("Resize", mode="linear"), between("Resize", mode="nearest")),
    ],
    ids=range(9),
)
def test_an_operator_of_a_slow_finding_runs_in_float(name, op, bad, good, tmp_path) -> None:
    for proto, found in ((bad, True), (good, False)):
        if proto is not None:
            assert (name in ids(proto)) == found
            assert runs_in_integers(OpenVino(), proto, tmp_path, op) != found


def test_signed_activations_are_named() -> None:
    assert "OVC016" in ids(convolution(data=np.int8))
    assert "OVC016" not in ids(convolution())
