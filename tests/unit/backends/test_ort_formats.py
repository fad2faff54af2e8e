"""Kernels of the installed ONNX Runtime for number formats other than 8-bit integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.onnxruntime import engine
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.onnxruntime.ops import BLOCKED_4, BLOCKED_8, BLOCKED_AXES
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(256, 64)).astype(np.float32)
X = RANDOM.normal(size=(2, 256)).astype(np.float32)


def linear(op_type: str, axis: int, weight: np.ndarray = WEIGHT) -> Model:
    """One linear operator whose sums run along ``axis`` of its weight, with a bias where it can have one."""
    made = f"Gemm<transB = {axis}>(x, w, b)" if op_type == "Gemm" else "MatMul(x, w)"
    stored = {"w": weight if axis == 0 else weight.T.copy(), "b": np.arange(64, dtype=np.float32)}
    return parsed(f"(float[2,256] x) => (float[2,64] y) {{ [linear] y = {made} }}", **stored)


def parsed(text: str, **constants: np.ndarray) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    read = {name for node in proto.graph.node for name in node.input}
    stored = [numpy_helper.from_array(values, name) for name, values in constants.items() if name in read]
    proto.graph.initializer.extend(stored)
    return Model(proto)


def weight_only(model: Model, fmt: str, axis: int) -> onnx.ModelProto:
    node = model.nodes[-1]
    site = Site(tensor="w", consumers=(Consumer(node.name, 1),), format=fmt, axis=axis, weight=True)
    return insert_qdq(model, Placement(sites=frozenset({site})), Quantizer(model, {})).proto


def built(proto: onnx.ModelProto, folder: Path) -> Engine:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return OnnxRuntime().build(path, BuildOptions())


def kernels(opened: Engine) -> set[str]:
    opened.bind({"x": X})
    return {layer.op_type for layer in opened.layers(runs=1)}


@pytest.mark.parametrize("fmt", [*BLOCKED_4, *BLOCKED_8])
@pytest.mark.parametrize("op_type", BLOCKED_AXES)
def test_blocks_along_the_first_axis_become_one_kernel(tmp_path: Path, op_type: str, fmt: str) -> None:
    proto = weight_only(linear(op_type, 0), fmt, 0)
    check(proto, tmp_path, {"MatMulNBits"})


def check(proto: onnx.ModelProto, folder: Path, expected: set[str]) -> None:
    """The kernels of a model are these, and nearly exact: they quantize rows of their inputs to 8 bits."""
    opened = built(proto, folder)
    (exact,) = ReferenceEvaluator(proto).run(None, {"x": X})
    np.testing.assert_allclose(opened.run({"x": X})["y"], exact, atol=0.02 * np.abs(exact).max())
    assert kernels(opened) == expected


@pytest.mark.parametrize("fmt", BLOCKED_8)
def test_eight_bits_in_blocks_do_not_saturate(tmp_path: Path, fmt: str) -> None:
    """All weights and inputs are at the end of their range: sums of two products exceed 16 bits."""
    model = linear("MatMul", 0, np.where(WEIGHT > 0, 1, 0.99).astype(np.float32))
    proto, x = weight_only(model, fmt, 0), np.ones_like(X)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(built(proto, tmp_path).run({"x": x})["y"], expected, rtol=1e-3)


def test_eight_bits_in_blocks_are_offered_from_the_version_that_fuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, offered in (("1.31.1", ()), ("1.32.0", BLOCKED_8), ("1.40.0.dev1", BLOCKED_8)):
        monkeypatch.setattr(engine, "_installed_version", lambda version=version: version)
        formats = OnnxRuntime().capabilities().formats
        assert tuple(name for name in formats if name in BLOCKED_8) == offered


def test_only_weights_with_a_kernel_are_offered() -> None:
    capabilities = OnnxRuntime().capabilities()

    def labels(model: Model) -> list[tuple[str, ...]]:
        space = SchemeSpace(model, capabilities, rules=QuantizeRules(format="int4"))
        return [unit.labels for unit in space.units]

    assert labels(linear("MatMul", 0)) == labels(linear("Gemm", 0)) == [("fp", "in-only")]
    assert labels(linear("Gemm", 1)) == []
    assert labels(Model(linear("MatMul", 0, WEIGHT[:96]).proto)) == []  # not a whole number of blocks


def test_two_formats_in_one_model_run_in_their_kernels(tmp_path: Path) -> None:
    """The first product reads 8-bit integers and writes floats, which the second one needs with 4-bit weights."""
    text = "(float[2,256] x) => (float[2,64] y) { a = MatMul(x, u)  b = Tanh(a)  y = MatMul(b, w) }"
    model = parsed(text, u=RANDOM.normal(size=(256, 256)).astype(np.float32), w=WEIGHT)
    space = SchemeSpace(model, OnnxRuntime().capabilities(), rules=QuantizeRules(format="int8+int4"))
    first, second = space.units
    assert first.labels == ("fp", "in+out", "in-only", "dynamic", "int4:in-only")
    assert second.labels == ("fp", "in-only", "dynamic", "int4:in-only")
    numbers = Quantizer(model, dict.fromkeys(space.tensors, TensorRange(-5.0, 5.0)))
    placement = space.resolve({first.id: "in-only", second.id: "int4:in-only"})
    mixed = insert_qdq(model, placement, numbers).proto
    check(mixed, tmp_path, {"QuantizeLinear", "MatMulIntegerToFloat", "Tanh", "MatMulNBits"})


def test_weight_only_products_fuse_only_with_float_inputs(tmp_path: Path) -> None:
    """A producer that can output floats therefore outputs them to a reader of which only the weight is quantized."""
    text = """(float[2,256] x) => (float[2,64] y) {
      q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = MatMul(d, w) }"""
    model = parsed(text, s=np.array(0.04, np.float32), z=np.array(128, np.uint8), w=WEIGHT)
    assert "MatMulNBits" not in kernels(built(weight_only(model, "int4", 0), tmp_path))
