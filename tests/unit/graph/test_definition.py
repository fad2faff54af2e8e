"""The definition of a model's values: the reference implementation, and models with integer operators."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx_text import outputs_of, parsed
from written_cases import normal

from qdqspec._core.arrays import Array
from qdqspec.graph.definition import as_defined, evaluator_of
from qdqspec.graph.model import Model
from qdqspec.graph.protos import all_graphs


@pytest.mark.parametrize("opset", [10, 13, 17, 19, 21])
@pytest.mark.parametrize("channels", [False, True])
def test_outputs_of_pairs_equal_those_of_onnx_runtime(opset: int, channels: bool) -> None:
    many = channels and opset > 10
    axis = "<axis = 1>" if many else ""
    scale = np.array([0.1, 0.02, 0.3], np.float32) if many else np.float32(0.05)
    model = parsed(
        f"""g (float[2,3,4] x) => (float[2,3,4] y, float[3] b) {{ q = QuantizeLinear{axis}(x, s, z)
        y = DequantizeLinear{axis}(q, s, z)  b = DequantizeLinear(ints, one) }}""",
        opset,
        s=scale,
        z=np.full(np.shape(scale), 7, np.uint8),
        ints=np.array([-(2**31), 0, 2**31 - 1], np.int32),
        one=np.float32(1e-6),
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)}
    for value, expected in zip(
        evaluator_of(model.proto).run(None, feeds), outputs_of(model, feeds), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_gather_elements_of_a_long_axis() -> None:
    """As BERT does in its table of token types; the evaluator of onnx 1.23 takes at most 64 elements."""
    text = "g (float[2,70] x, int64[1,3] i) => (float[1,3] y) { y = GatherElements<axis = 1>(x, i) }"
    model = parsed(text, 17)
    feeds = {"x": np.arange(140, dtype=np.float32).reshape(2, 70), "i": np.array([[69, -70, 3]])}
    assert evaluator_of(model.proto).run(None, feeds)[0].tolist() == [[69, 0, 3]]


def integers(*shape: int, kind: type = np.uint8) -> Array:
    """All values of the type are possible: kernels that add two products in 16 bits saturate."""
    bounds = np.iinfo(kind)
    return np.random.default_rng(shape).integers(bounds.min, bounds.max + 1, size=shape).astype(kind)


def scales(*shape: int) -> Array:
    return np.random.default_rng(shape).uniform(0.001, 0.004, shape).astype(np.float32)


def one_node(
    op: str, output: str, fed: Array, constants: Mapping[str, object], attributes: str = ""
) -> Model:
    """A model of one node, whose inputs are the fed one and the constants."""
    kind = {"float32": "float"}.get(str(fed.dtype), str(fed.dtype))
    text = f"""g ({kind}[{",".join(map(str, fed.shape))}] a) => ({output} y) {{
        [node] y = {op}{attributes and f"<{attributes}>"}({", ".join(["a", *constants])}) }}"""
    return parsed(text, **constants)


def defined(model: Model, a: Array) -> Array:
    return outputs_of(as_defined(model), {"a": a})[0]


def is_within_one_step(seen: Array, expected: Array) -> bool:
    """Sums in float32 may round a value halfway between two steps to the other one."""
    difference = np.abs(seen.astype(np.int64) - expected.astype(np.int64))
    return bool(difference.max() <= 1 and (difference > 0).mean() < 0.01)


QLINEAR = {"xs": np.float32(0.02), "xz": np.uint8(120), "w": integers(8, 3, 3, 3, kind=np.int8)}
STEPS = {"ys": np.float32(0.09), "yz": np.uint8(128)}
BIAS = {"b": integers(8, kind=np.int16).astype(np.int32)}


@pytest.mark.parametrize(
    ("op", "attributes", "constants"),
    [
        ("QLinearConv", "strides = [2, 1], ", {**QLINEAR, "ws": scales(), "wz": np.int8(0), **STEPS, **BIAS}),
        ("QLinearConv", "", {**QLINEAR, "ws": scales(8), "wz": np.zeros(8, np.int8), **STEPS}),
        ("ConvInteger", "", {"w": QLINEAR["w"], "xz": np.uint8(100)}),  # pads with the zero point
    ],
)
def test_convolutions_of_integers(op: str, attributes: str, constants: dict[str, object]) -> None:
    a = integers(2, 6, 9, 9)
    output = "int32[n,c,h,w]" if op == "ConvInteger" else "uint8[n,c,h,w]"
    model = one_node(op, output, a, constants, f"{attributes}group = 2, pads = [1, 1, 1, 1]")
    (expected,) = ReferenceEvaluator(model.proto).run(None, {"a": a})
    found = defined(model, a)
    assert np.array_equal(found, expected) if op == "ConvInteger" else is_within_one_step(found, expected)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("per_column", [False, True])
def test_qlinear_matmul(kind: type, per_column: bool) -> None:
    a, b, many = integers(3, 5, 16), integers(16, 7, kind=kind), (7,) if per_column else ()
    scale = scales(*many)
    constants = {"as": np.float32(0.02), "az": np.uint8(3), "b": b, "bs": scale, "bz": np.full(many, 4, kind)}
    constants |= {"ys": np.float32(0.1), "yz": np.uint8(99)}
    product = ((a.astype(np.float64) - 3) * 0.02) @ ((b.astype(np.float64) - 4) * scale)
    steps = np.clip(np.rint(product / 0.1) + 99, 0, 255)
    assert is_within_one_step(defined(one_node("QLinearMatMul", "uint8[n,k,m]", a, constants), a), steps)


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_runtime_with_float_results(bias: bool) -> None:
    a, b = normal(6, 32), integers(32, 5, kind=np.int8)
    right, c = (b.astype(np.float64) - 2) * 0.01, normal(5) * bias
    last: dict[str, object] = {"c": c} if bias else {}
    scale, zero = {"bs": np.float32(0.01)}, {"bz": np.int8(2)}
    model = one_node(
        "com.microsoft.DynamicQuantizeMatMul", "float[n,m]", a, {"b": b, **scale, **zero, **last}
    )
    low, high = min(a.min(), 0.0), max(a.max(), 0.0)
    step = (high - low) / 255
    shift = np.rint(-low / step)
    expected = ((np.clip(np.rint(a / step) + shift, 0, 255) - shift) * step) @ right + c
    assert np.abs(defined(model, a) - expected).max() < 0.05 * np.abs(expected).max()

    a = integers(6, 32)
    constants = {"b": b, "as": np.float32(0.02), **scale, "az": np.uint8(11), **zero, **last}
    seen = defined(one_node("com.microsoft.MatMulIntegerToFloat", "float[n,m]", a, constants), a)
    np.testing.assert_allclose(seen, ((a.astype(np.float64) - 11) * 0.02) @ right + c, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("turned", "rescaled"), [(False, True), (True, False)])
def test_qgemm(turned: bool, rescaled: bool) -> None:
    a, b, scale = integers(6, 32), integers(32, 5, kind=np.int8), scales(5)
    c = integers(5, kind=np.int16).astype(np.int32)
    constants = {"as": np.float32(0.02), "az": np.uint8(5), "b": b.T.copy() if turned else b, "bs": scale}
    constants |= {"bz": np.zeros(5, np.int8), "c": c}
    constants |= {"ys": np.float32(0.05), "yz": np.uint8(90)} if rescaled else {}
    output, attributes = "uint8[n,m]" if rescaled else "float[n,m]", f"alpha = 0.5, transB = {int(turned)}"
    seen = defined(one_node("com.microsoft.QGemm", output, a, constants, attributes), a)
    expected = 0.5 * (((a.astype(np.float64) - 5) * 0.02) @ (b * scale.astype(np.float64)) + 0.02 * scale * c)
    if rescaled:
        assert is_within_one_step(seen, np.clip(np.rint(expected / 0.05) + 90, 0, 255))
    else:
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_recurrences_have_unsigned_weights(kind: type) -> None:
    """With small weights nothing saturates, so that the model with int8 weights computes the same."""
    offset = 0 if kind is np.int8 else 128
    random = np.random.default_rng(3)
    small = {n: random.integers(-30, 30, size=s) for n, s in (("w", (2, 6, 20)), ("r", (2, 5, 20)))}
    constants: dict[str, object] = {name: (values + offset).astype(kind) for name, values in small.items()}
    constants |= {name: np.full(2, 0.02, np.float32) for name in ("ws", "rs")}
    constants |= {name: np.full(2, offset, kind) for name in ("wz", "rz")}
    model = parsed(
        """g (float[7,2,6] a) => (float[s,d,b,h] y) { [lstm] y = com.microsoft.DynamicQuantizeLSTM<
        direction = "bidirectional", hidden_size = 5>(a, w, r, , , , , , ws, wz, rs, rz) }""",
        **constants,
    )
    a = normal(7, 2, 6)
    np.testing.assert_array_equal(defined(model, a), outputs_of(model, {"a": a})[0])
    found = Model(as_defined(model))
    (lstm,) = (node for node in found.nodes if node.op_type == "DynamicQuantizeLSTM")
    assert {found.constants[lstm.inputs[i]].data_type for i in (1, 2, 9, 11)} == {TensorProto.UINT8}


def test_operators_of_bodies_are_defined_too() -> None:
    a, b = integers(4, 16), integers(16, 3, kind=np.int8)
    model = parsed(
        """g (uint8[4,16] a, bool c) => (int32[4,3] y, int32[4,3] z) {
            y = If (c) <then_branch = t () => (int32[4,3] p) { p = MatMulInteger(a, b) },
                        else_branch = e () => (int32[4,3] q) { q = MatMulInteger(a, b) }>
            z = MatMulInteger(a, b) }""",
        b=b,
    )
    for found in outputs_of(as_defined(model), {"a": a, "c": np.array(True)}):
        np.testing.assert_array_equal(found, a.astype(np.int64) @ b.astype(np.int64))
    assert all(node.op_type != "MatMulInteger" for node in Model(as_defined(model)).nodes)
    graphs = all_graphs(as_defined(model).graph)
    made = [name for graph in graphs for node in graph.node for name in node.output]
    assert len({*made}) == len(made), "runtimes refuse a name that two graphs have"
