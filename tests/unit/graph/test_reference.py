"""The definition of a model's values: the reference implementation, and models with integer operators."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_text import outputs_of, parsed

from qdqspec._core.arrays import Array
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.definition import as_defined
from qdqspec.graph.model import Model
from qdqspec.graph.reference import reference_outputs


@pytest.mark.parametrize("opset", [10, 13, 17, 19, 21])
@pytest.mark.parametrize("channels", [False, True])
def test_outputs_of_pairs_equal_those_of_onnx_runtime(tmp_path: Path, opset: int, channels: bool) -> None:
    many = channels and opset > 10
    axis = "<axis = 1>" if many else ""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2,3,4] x) => (float[2,3,4] y, float[3] b) {{
      q = QuantizeLinear{axis}(x, s, z)  y = DequantizeLinear{axis}(q, s, z)  b = DequantizeLinear(ints, one) }}"""
    proto = onnx.parser.parse_model(text)
    scale = np.array([0.1, 0.02, 0.3], np.float32) if many else np.float32(0.05)
    for name, values in (
        ("s", scale),
        ("z", np.full(np.shape(scale), 7, np.uint8)),
        ("ints", np.array([-(2**31), 0, 2**31 - 1], np.int32)),
        ("one", np.float32(1e-6)),
    ):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    path = tmp_path / "pairs.onnx"
    onnx.save(proto, path)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)}
    expected = OnnxRuntime().build(path, BuildOptions()).run(feeds)
    found = reference_outputs(path, feeds)
    assert list(found) == ["y", "b"]
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


CONVS = {
    "plain": ("1,4,9,9", "6,4,3,3", ""),
    "padded": ("2,4,9,9", "6,4,3,3", "pads = [0,1,2,1], strides = [2,1]"),
    "dilated": ("1,4,11,11", "6,4,3,3", "dilations = [2,3], pads = [2,2,2,2]"),
    "groups": ("2,6,8,8", "6,2,3,3", "group = 3, pads = [1,1,1,1]"),
    "depthwise": ("1,6,8,8", "6,1,5,5", "group = 6, strides = [2,2], pads = [2,2,2,2]"),
    "upper": ("1,4,8,8", "6,4,4,4", 'auto_pad = "SAME_UPPER", strides = [2,2]'),
    "lower": ("1,4,8,8", "6,4,4,4", 'auto_pad = "SAME_LOWER", strides = [3,3]'),
    "valid": ("1,4,8,8", "6,4,4,4", 'auto_pad = "VALID"'),
    "one axis": ("2,4,9", "6,4,3", "pads = [1,1]"),
    "three axes": ("1,2,5,5,5", "3,2,2,2,2", "strides = [1,2,1]"),
}


def conv_model(
    path: Path, shape: str, weight: str, attributes: str, nodes: str = ""
) -> dict[str, np.ndarray]:
    """A model with a convolution before other nodes, and an input for it."""
    given, sizes = ([int(size) for size in text.split(",")] for text in (shape, weight))
    dims = ",".join(f"d{axis}" for axis in range(len(given)))
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[{shape}] x) => (float[{dims}] y) {{
        {"c" if nodes else "y"} = Conv{f"<{attributes}>" if attributes else ""}(x, w, b) {nodes} }}"""
    )
    random = np.random.default_rng(0)
    for name, size in (("w", sizes), ("b", sizes[:1])):
        values = random.normal(size=size).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(proto, path)
    return {"x": random.normal(size=given).astype(np.float32)}


@pytest.mark.parametrize("name", CONVS)
def test_outputs_of_a_convolution_equal_those_of_onnx_runtime(tmp_path: Path, name: str) -> None:
    feeds = conv_model(tmp_path / "conv.onnx", *CONVS[name])
    expected = OnnxRuntime().build(tmp_path / "conv.onnx", BuildOptions()).run(feeds)
    found = reference_outputs(tmp_path / "conv.onnx", feeds)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-4, atol=1e-5)


def test_memory_is_bounded_by_the_largest_tensors(tmp_path: Path) -> None:
    """Tensors are released after their last reader, and a convolution needs a small multiple of its output."""
    names = ["c", *(f"r{number}" for number in range(30)), "y"]
    chain = " ".join(f"{after} = Relu({before})" for before, after in pairwise(names))
    feeds = conv_model(tmp_path / "deep.onnx", "1,16,128,128", "16,16,3,3", "pads = [1,1,1,1]", chain)
    tracemalloc.start()
    try:
        reference_outputs(tmp_path / "deep.onnx", feeds)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * feeds["x"].nbytes


def test_a_body_reads_tensors_of_the_outer_graph(tmp_path: Path) -> None:
    """A tensor that only a body reads is not an input of the node, but must not be released before the node has run."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x, bool c) => (float[2] y) {
        a = Relu(x)  b = Neg(a)
        d = If (c) <then_branch = t () => (float[2] p) { p = Add(a, b) },
                    else_branch = e () => (float[2] q) { q = Sub(a, b) }>
        f = Abs(d)  y = Neg(f) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "body.onnx")
    found = reference_outputs(tmp_path / "body.onnx", {"x": np.float32([1, -2]), "c": np.array(False)})
    assert found["y"].tolist() == [-2.0, 0.0]


RANDOM = np.random.default_rng(3)
MICROSOFT = "com.microsoft"


def integers(*shape: int, kind: type = np.uint8) -> Array:
    """All values of the type are possible: kernels that add two products in 16 bits saturate."""
    bounds = np.iinfo(kind)
    return RANDOM.integers(bounds.min, bounds.max + 1, size=shape).astype(kind)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Array],
    constants: Mapping[str, object],
    outputs: tuple[int, ...],
) -> onnx.ModelProto:
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info(f"y{i}" if i else "y", kind, None) for i, kind in enumerate(outputs)
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", values, results, stored)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def defined(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    return outputs_of(as_defined(Model(proto)), feeds)


def is_within_one_step(seen: Array, expected: Array) -> bool:
    """Sums in float32 may round a value halfway between two steps to the other one."""
    difference = np.abs(seen.astype(np.int64) - expected.astype(np.int64))
    return bool(difference.max() <= 1 and (difference > 0).mean() < 0.01)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_qlinear_conv(per_channel: bool, bias: bool) -> None:
    x, w = integers(2, 6, 9, 9), integers(8, 3, 3, 3, kind=np.int8)
    scale = RANDOM.uniform(0.001, 0.004, 8 if per_channel else ()).astype(np.float32)
    zero = np.zeros(8 if per_channel else (), np.int8)
    constants = {"xs": np.float32(0.02), "xz": np.uint8(120), "w": w, "ws": scale, "wz": zero}
    constants |= {"ys": np.float32(0.09), "yz": np.uint8(128)} | (
        {"b": integers(8, kind=np.int16).astype(np.int32)} if bias else {}
    )
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", *(["b"] if bias else [])]
    node = helper.make_node("QLinearConv", names, ["y"], "conv", group=2, pads=[1, 1, 1, 1], strides=[2, 1])
    proto = model_of([node], {"x": x}, constants, (TensorProto.UINT8,))
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert is_within_one_step(defined(proto, {"x": x})[0], expected)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("per_column", [False, True])
def test_qlinear_matmul(kind: type, per_column: bool) -> None:
    a, b = integers(3, 5, 16), integers(16, 7, kind=kind)
    scale = RANDOM.uniform(0.001, 0.004, 7 if per_column else ()).astype(np.float32)
    zero = np.full(7 if per_column else (), 4, kind)
    constants = {"as": np.float32(0.02), "az": np.uint8(3), "b": b, "bs": scale, "bz": zero}
    constants |= {"ys": np.float32(0.1), "yz": np.uint8(99)}
    node = helper.make_node("QLinearMatMul", ["a", *constants], ["y"], "product")
    product = ((a.astype(np.float64) - 3) * 0.02) @ ((b.astype(np.float64) - 4) * scale)
    steps = np.clip(np.rint(product / 0.1) + 99, 0, 255)
    assert is_within_one_step(
        defined(model_of([node], {"a": a}, constants, (TensorProto.UINT8,)), {"a": a})[0], steps
    )


def test_conv_integer_pads_with_the_zero_point() -> None:
    x, w = integers(1, 4, 6, 6), integers(5, 4, 3, 3, kind=np.int8)
    node = helper.make_node("ConvInteger", ["x", "w", "xz"], ["y"], "conv", pads=[1, 1, 1, 1])
    proto = model_of([node], {"x": x}, {"w": w, "xz": np.uint8(100)}, (TensorProto.INT32,))
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_array_equal(defined(proto, {"x": x})[0], expected)


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_runtime_with_float_results(bias: bool) -> None:
    a, b = RANDOM.normal(size=(6, 32)).astype(np.float32), integers(32, 5, kind=np.int8)
    constants: dict[str, object] = {"b": b, "bs": np.float32(0.01), "bz": np.int8(2)}
    constants |= {"c": RANDOM.normal(size=5).astype(np.float32)} if bias else {}
    node = helper.make_node("DynamicQuantizeMatMul", ["a", *constants], ["y"], "product", domain=MICROSOFT)
    seen = defined(model_of([node], {"a": a}, constants, (TensorProto.FLOAT,)), {"a": a})[0]
    low, high = min(a.min(), 0.0), max(a.max(), 0.0)
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    steps = np.clip(np.rint(a / scale) + zero, 0, 255) - zero
    expected = (steps * scale) @ ((b.astype(np.float64) - 2) * 0.01) + constants.get("c", 0.0)
    assert np.abs(seen - expected).max() < 0.05 * np.abs(expected).max()

    integer = integers(6, 32)
    inputs = ["a", "b", "as", "bs", "az", "bz", *(["c"] if bias else [])]
    constants |= {"as": np.float32(0.02), "az": np.uint8(11)}
    node = helper.make_node("MatMulIntegerToFloat", inputs, ["y"], "product", domain=MICROSOFT)
    seen = defined(model_of([node], {"a": integer}, constants, (TensorProto.FLOAT,)), {"a": integer})[0]
    expected = ((integer.astype(np.float64) - 11) * 0.02) @ (
        (b.astype(np.float64) - 2) * 0.01
    ) + constants.get("c", 0.0)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rescaled", [False, True])
def test_qgemm(turned: bool, rescaled: bool) -> None:
    a, b = integers(6, 32), integers(32, 5, kind=np.int8)
    scale = RANDOM.uniform(0.001, 0.004, 5).astype(np.float32)
    c = integers(5, kind=np.int16).astype(np.int32)
    constants: dict[str, object] = {
        "as": np.float32(0.02),
        "az": np.uint8(5),
        "b": b.T.copy() if turned else b,
        "bs": scale,
        "bz": np.zeros(5, np.int8),
        "c": c,
    }
    constants |= {"ys": np.float32(0.05), "yz": np.uint8(90)} if rescaled else {}
    node = helper.make_node(
        "QGemm", ["a", *constants], ["y"], "gemm", domain=MICROSOFT, alpha=0.5, transB=int(turned)
    )
    kind = TensorProto.UINT8 if rescaled else TensorProto.FLOAT
    seen = defined(model_of([node], {"a": a}, constants, (kind,)), {"a": a})[0]
    expected = 0.5 * (((a.astype(np.float64) - 5) * 0.02) @ (b * scale.astype(np.float64)) + 0.02 * scale * c)
    if rescaled:
        assert is_within_one_step(seen, np.clip(np.rint(expected / 0.05) + 90, 0, 255))
    else:
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_recurrences_have_unsigned_weights(kind: type) -> None:
    """With small weights nothing saturates, so that the model with int8 weights computes the same."""
    x = RANDOM.normal(size=(7, 2, 6)).astype(np.float32)
    weights = [RANDOM.integers(-30, 30, size=shape) for shape in ((2, 6, 20), (2, 5, 20))]
    offset = 0 if kind is np.int8 else 128
    stored = {name: (values + offset).astype(kind) for name, values in zip("wr", weights, strict=True)}
    scales = {name: np.full(2, 0.02, np.float32) for name in ("ws", "rs")}
    zeros = {name: np.full(2, offset, kind) for name in ("wz", "rz")}
    inputs = ["x", "w", "r", "", "", "", "", "", "ws", "wz", "rs", "rz"]
    attributes = {"domain": MICROSOFT, "direction": "bidirectional", "hidden_size": 5}
    node = helper.make_node("DynamicQuantizeLSTM", inputs, ["y"], "lstm", **attributes)
    proto = model_of([node], {"x": x}, stored | scales | zeros, (TensorProto.FLOAT,))
    np.testing.assert_array_equal(defined(proto, {"x": x})[0], outputs_of(proto, {"x": x})[0])
    found = as_defined(Model(proto))
    types = {tensor.name: tensor.data_type for tensor in found.graph.initializer}
    (lstm,) = (each for each in found.graph.node if each.op_type == "DynamicQuantizeLSTM")
    assert {types[lstm.input[i]] for i in (1, 2, 9, 11)} == {TensorProto.UINT8}


def test_operators_of_bodies_are_defined_too() -> None:
    a, b = integers(4, 16), integers(16, 3, kind=np.int8)
    proto = parsed(
        """g (uint8[4,16] a, bool c) => (int32[4,3] y) {
            y = If (c) <then_branch = t () => (int32[4,3] p) { p = MatMulInteger(a, b) },
                        else_branch = e () => (int32[4,3] q) { q = MatMulInteger(a, b) }> }""",
        b=b,
    ).proto
    (found,) = defined(proto, {"a": a, "c": np.array(True)})
    np.testing.assert_array_equal(found, a.astype(np.int64) @ b.astype(np.int64))
    assert "MatMulInteger" not in str(as_defined(Model(proto)))
