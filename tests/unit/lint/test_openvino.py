"""Each lint rule for OpenVINO, and the behaviour of the installed version that the rule states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from openvino_installed import require_openvino
from operator_models import IMAGE, MATRIX, Graph, conv, layers_of, runs_in_integers

from qdqspec.backends.openvino.engine import OpenVino
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model

RANDOM = np.random.default_rng(0)


def ids(proto: onnx.ModelProto) -> set[str]:
    return {finding.id for finding in lint_model(Model(proto), "openvino-cpu")}


@pytest.fixture(autouse=True)
def installed() -> None:
    require_openvino()


def with_constant(
    op: str, shape: tuple[int, ...], *, first: bool = False, behind: str = "Relu"
) -> onnx.ModelProto:
    """The operator on quantized data of a shape, and a constant with a pair."""
    g = Graph()
    data = (1, 8, 6, 6) if len(shape) != 2 else (4, 32)
    x = g.input(data)
    x = g.pair(conv(g, x) if behind == "Conv" else g.node(behind, x))
    constant = g.pair(g.const(RANDOM.random(shape), np.float32))
    return g.model(g.pair(g.node(op, *((constant, x) if first else (x, constant)))))


REFUSED = [
    with_constant("Add", IMAGE), with_constant("Sub", IMAGE, first=True), with_constant("Add", (6,)),
    with_constant("Add", (8, 1, 1), behind="Conv"), with_constant("Mul", (4, 32)),
]  # fmt: skip
ACCEPTED = [
    with_constant("Sub", IMAGE), with_constant("Add", (8, 1, 1)), with_constant("Mul", (1, 8, 1, 1)),
    with_constant("Add", ()),
]  # fmt: skip


@pytest.mark.parametrize("proto", REFUSED, ids=range(len(REFUSED)))
def test_a_quantized_constant_is_refused(proto: onnx.ModelProto, tmp_path: Path) -> None:
    assert "OVC001" in ids(proto)
    with pytest.raises(BackendError, match="out of range"):
        layers_of(OpenVino(), proto, tmp_path)


@pytest.mark.parametrize("proto", ACCEPTED, ids=range(len(ACCEPTED)))
def test_other_constants_are_not_refused(proto: onnx.ModelProto, tmp_path: Path) -> None:
    assert "OVC001" not in ids(proto)
    layers_of(OpenVino(), proto, tmp_path)


def convolution(
    stored: type = np.int8, zero: int = 0, data: type = np.uint8, *, bare: bool = False
) -> onnx.ModelProto:
    """A Conv of quantized data; with ``bare`` its weight is float."""
    g = Graph()
    x = g.input(IMAGE, dtype=data, zero=100)
    values = RANDOM.integers(0, 60, (8, 8, 3, 3))
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


# rule: (a model that breaks it, a model that does not, the operator that runs in integers in the second one only)
SLOW = {
    "OVC010-type": (convolution(np.uint8, 128), convolution(), "Conv"),
    "OVC010-zero": (convolution(zero=3), convolution(), "Conv"),
    "OVC011": (convolution(data=np.uint16), convolution(), "Conv"),
    "OVC012": (convolution(bare=True), convolution(), "Conv"),
    "OVC013": (product(constant=False), product(constant=True), "MatMul"),
    "OVC014": (total(both=False), total(both=True), "Add"),
    "OVC015-softmax": (between("Softmax", axis=-1), between("MaxPool", kernel_shape=[2, 2]), ""),
    "OVC015-transposed": (between("ConvTranspose"), between("MaxPool", kernel_shape=[2, 2]), ""),
    "OVC015-resize": (between("Resize", mode="linear"), between("Resize", mode="nearest"), "Resize"),
}


@pytest.mark.parametrize("case", SLOW)
def test_models_of_slow_findings_run_in_float(case: str, tmp_path: Path) -> None:
    bad, good, op = SLOW[case]
    name = case.partition("-")[0]
    assert name in ids(bad)
    assert name not in ids(good)
    own = {"OVC015-softmax": "Softmax", "OVC015-transposed": "ConvTranspose"}.get(case, op)
    assert not runs_in_integers(OpenVino(), bad, tmp_path, own)
    assert runs_in_integers(OpenVino(), good, tmp_path, op or "MaxPool")


def test_signed_activations_are_named() -> None:
    assert "OVC016" in ids(convolution(data=np.int8))
    assert "OVC016" not in ids(convolution())
