"""Each rule for TensorRT: a model that breaks it, and the nearest one that does not."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model
from qdqspec.lint import lint_model, rules_for
from qdqspec.lint.rules import TENSORRT

F32 = np.float32
IMAGE = "float[1,16,8,8] x"
ROWS = "float[4,16] x"
QX = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z) "
DW = "v = DequantizeLinear<axis = 0>(w, ws, wz) "
CONV = QX + DW + "c = Conv<pads = [1, 1, 1, 1]>(a, v) "
FP8 = {"z": np.zeros((), ml_dtypes.float8_e4m3fn)}


def two(name: str, source: str, scale: str = "s") -> str:
    """A pair on ``source`` that gives ``name``."""
    return f"q{name} = QuantizeLinear({source}, {scale}, z)  {name} = DequantizeLinear(q{name}, {scale}, z) "


def skip(on_skip: bool, on_conv: bool) -> str:
    """A residual block of one convolution, with pairs where asked."""
    text = CONV + (two("l", "c") if on_conv else "") + (two("r", "x", "s2") if on_skip else "")
    left, right = ("l" if on_conv else "c"), ("r" if on_skip else "x")
    return text + f"t = Add({left}, {right})  u = Relu(t) " + two("o", "u") + "y = Neg(o)"


def attention(*, q: bool, p: bool) -> str:
    """Two products around a Softmax; ``q`` quantizes the inputs of the first, ``p`` those of the second."""
    text = two("qa", "x") + two("ka", "k") + "d = MatMul(qa, ka) " if q else "d = MatMul(x, k) "
    text += "e = Mul(d, s)  f = Softmax(e) "
    return text + (two("pa", "f") + two("va", "n") + "y = MatMul(pa, va)" if p else "y = MatMul(f, n)")


SQUARES = "float[16,16] x, float[16,16] k, float[16,16] n"
Case = tuple[str, str, dict[str, np.ndarray]]  # inputs, nodes, constants

# rule: (a model that breaks it, a model that does not)
CASES: dict[str, tuple[Case, Case]] = {
    "TRT001": (
        (ROWS, "q = QuantizeLinear(x, s, zu)  a = DequantizeLinear(q, s, zu)  y = Neg(a)", {}),
        (ROWS, QX + "y = Neg(a)", {}),
    ),
    "TRT002": (
        (IMAGE, CONV + "y = Neg(c)", {"ws": np.r_[np.full(15, 0.01), 0].astype(F32)}),
        (IMAGE, CONV + "y = Neg(c)", {}),
    ),
    "TRT003": (
        (ROWS + ", float t", "q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)  y = Neg(a)", {}),
        (ROWS, QX + "y = Neg(a)", {}),
    ),
    "TRT004": (
        (IMAGE, QX + DW + "d = DequantizeLinear<axis = 0>(bi, bs)  y = Conv(a, v, d)", {}),
        (IMAGE, QX + DW + "y = Conv(a, v, b)", {}),
    ),
    "TRT005": (
        (ROWS, QX + "y = Neg(a)", {"z": np.array(0, np.int16)}),
        (ROWS, QX + "y = Neg(a)", FP8),
    ),
    "TRT006": (
        (ROWS, "q = QuantizeLinear(x, s, z0)  a = DequantizeLinear(q, s, z0)  y = Neg(a)", {}),
        (ROWS, QX + "y = Neg(a)", {}),
    ),
    "TRT007": (
        (ROWS, "q = QuantizeLinear(x, ws, wz)  a = DequantizeLinear(q, ws, wz)  y = Neg(a)", {}),
        (IMAGE, "q = QuantizeLinear<axis = 0>(fw, ws, wz) " + DW.replace("(w", "(q") + "y = Conv(x, v)", {}),
    ),
    "TRT008": (
        (IMAGE, QX + DW.replace("axis = 0", "axis = 1") + "y = Conv(a, v)", {}),
        (IMAGE, QX + DW.replace("axis = 0", "axis = 1") + "y = ConvTranspose(a, v)", {}),
    ),
    "TRT010": (
        (ROWS, "v = DequantizeLinear<axis = 0, block_size = 8>(m, t, u)  y = MatMul(x, v)",
         {"t": np.ones((2, 16), F32), "u": np.zeros((2, 16), np.int8)}),
        (ROWS, "v = DequantizeLinear<axis = 0, block_size = 8>(h, t)  y = MatMul(x, v)",
         {"t": np.ones((2, 16), F32), "h": np.zeros((16, 16), np.int8).astype(ml_dtypes.int4)}),
    ),
    "TRT011": (
        (ROWS, "q = QuantizeLinear(x, s, z)  i = MatMulInteger(q, m)  y = Cast<to = 1>(i)", {}),
        (ROWS, QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)", {}),
    ),
    "TRT012": (
        (ROWS, QX.replace("= Q", "= com.microsoft.Q").replace("= D", "= com.microsoft.D") + "y = Neg(a)", {}),
        (ROWS, QX + "y = Neg(a)", {}),
    ),
    "TRT021": ((ROWS, QX + "y = Neg(a)", FP8), (ROWS, QX + "y = Neg(a)", {})),
    "TRT030": ((IMAGE, QX + "y = Conv(a, fw)", {}), (IMAGE, CONV + "y = Neg(c)", {})),
    "TRT031": ((IMAGE, skip(True, True), {}), (IMAGE, skip(True, False), {})),
    "TRT032": ((IMAGE, skip(False, False), {}), (IMAGE, skip(True, False), {})),
    "TRT033": (
        (IMAGE, "p = Pad(x, e) " + two("a", "p") + DW + "y = Conv(a, v)", {"e": np.array([0, 0, 1, 1] * 2)}),
        (IMAGE, QX + "p = Pad(a, e) " + DW + "y = Conv(p, v)", {"e": np.array([0, 0, 1, 1] * 2)}),
    ),
    "TRT034": (
        (ROWS, two("a", "x") + "n = Neg(x) " + two("d", "n", "s2") + "y = Concat<axis = 0>(a, d)", {}),
        (ROWS, two("a", "x") + "n = Neg(x) " + two("d", "n") + "y = Concat<axis = 0>(a, d)", {}),
    ),
    "TRT035": (
        (IMAGE, QX + "p = MaxPool<kernel_shape = [2, 2]>(a) " + two("d", "p", "s2") + "y = Neg(d)", {}),
        (IMAGE, QX + "p = MaxPool<kernel_shape = [2, 2]>(a) " + two("d", "p") + "y = Neg(d)", {}),
    ),
    "TRT036": (
        (IMAGE, CONV + "t = Transpose<perm = [0, 2, 3, 1]>(c)  y = LayerNormalization(t, b)", {}),
        (IMAGE, CONV + "t = Transpose<perm = [0, 2, 3, 1]>(c) " + two("d", "t") + "y = LayerNormalization(d, b)", {}),
    ),
    "TRT037": (
        (ROWS, two("a", "x") + "n = Neg(x) " + two("d", "n") + "y = Mul(a, d)", {}),
        (ROWS, two("a", "x") + "n = Neg(x) " + two("d", "n") + "t = Mul(a, d) " + two("o", "t") + "y = Neg(o)", {}),
    ),
    "TRT038": (
        (ROWS, two("a", "x") + two("d", "x", "s2") + "t = Neg(d)  y = Sub(a, t)", {}),
        (ROWS, two("a", "x") + two("d", "x") + "t = Neg(d)  y = Sub(a, t)", {}),
    ),
    "TRT039": (
        (SQUARES, two("a", "k") + "t = Transpose(a)  y = MatMul(x, t)", {}),
        (SQUARES, "t = Transpose(k) " + two("a", "t") + "y = MatMul(x, a)", {}),
    ),
    "TRT040": (
        (IMAGE, QX + "v = DequantizeLinear(w, s, z)  y = Conv(a, v)", {"w": np.ones((12, 16, 3, 3), np.int8)}),
        (IMAGE, QX + "v = DequantizeLinear(w, s, z)  y = Conv(a, v)", {"w": np.ones((8, 16, 3, 3), np.int8)}),
    ),
    "TRT041": (
        (IMAGE, QX + "v = DequantizeLinear(w, s, z)  y = Conv(a, v)",
         {**FP8, "w": np.ones((16, 16, 6, 6)).astype(ml_dtypes.float8_e4m3fn)}),
        (IMAGE, QX + "v = DequantizeLinear(w, s, z)  y = Conv(a, v)",
         {**FP8, "w": np.ones((16, 16, 5, 5)).astype(ml_dtypes.float8_e4m3fn)}),
    ),
    "TRT042": (
        (ROWS, QX + "y = Neg(a)", {}),
        ("float16[4,16] x", QX + "n = Neg(a)  y = Cast<to = 1>(n)", {"s": np.array(0.05, np.float16)}),
    ),
    "TRT043": ((SQUARES, attention(q=True, p=False), {}), (SQUARES, attention(q=True, p=True), {})),
    "TRT044": (
        (ROWS, QX + "y = Softmax(a)", {}),
        (ROWS, QX + "t = Softmax(a)  u = Neg(a)  y = Add(t, u)", {}),
    ),
    "TRT045": (
        (IMAGE, QX + "v = DequantizeLinear(w, s, z)  y = Conv(a, v)", {}),
        (IMAGE, CONV + "y = Neg(c)", {}),
    ),
}  # fmt: skip


def ids(model: Model, **options: tuple[int, int]) -> set[str]:
    return {finding.id for finding in lint_model(model, "tensorrt-11", **options)}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_broken_here_and_not_there(parsed: Callable[..., Model], name: str) -> None:
    (inputs, nodes, constants), good = CASES[name]
    assert name in ids(parsed(inputs, "y", nodes, **constants))
    inputs, nodes, constants = good
    assert name not in ids(parsed(inputs, "y", nodes, **constants))


def test_scales_of_another_type_than_the_data(parsed: Callable[..., Model]) -> None:
    text = QX.replace("zeLinear(q", "zeLinear<output_dtype = 10>(q")
    text += "n = Neg(a)  y = Cast<to = 1>(n)"
    assert "TRT009" in ids(parsed("float16[4,16] x", "y", text, opset=23))
    assert "TRT009" not in ids(parsed("float16[4,16] x", "y", text, opset=23, s=np.array(0.05, np.float16)))


def test_what_depends_on_the_gpu(parsed: Callable[..., Model]) -> None:
    fp8, int8 = (parsed(ROWS, "y", QX + "y = Neg(a)", **numbers) for numbers in (FP8, {}))
    assert "TRT020" in ids(fp8, compute_capability=(8, 6))
    assert not {"TRT020", "TRT021"} & ids(fp8, compute_capability=(8, 9))
    assert "TRT022" in ids(int8, compute_capability=(7, 5))
    assert not {"TRT020", "TRT022"} & ids(int8, compute_capability=(8, 0))


def test_every_rule_is_tried() -> None:
    elsewhere = {"TRT009", "TRT020", "TRT022"}
    assert {rule.id for rule in rules_for() if rule.targets == TENSORRT} == CASES.keys() | elsewhere


def test_a_float_model_has_no_findings(parsed: Callable[..., Model]) -> None:
    model = parsed(IMAGE, "y", "c = Conv(x, fw)  t = Relu(c)  y = Softmax(t)")
    assert lint_model(model, "tensorrt-10") == ()


def test_gravest_first(parsed: Callable[..., Model]) -> None:
    text = two("a", "x") + "q2 = QuantizeLinear(a, s, zu)  d = DequantizeLinear(q2, s, zu)  y = Softmax(d)"
    severities = [finding.severity for finding in lint_model(parsed(ROWS, "y", text), "tensorrt-11")]
    assert severities == sorted(severities, key=("refused", "slow", "note").index)
    assert set(severities) == {"refused", "slow", "note"}


def test_an_unknown_target_is_refused(parsed: Callable[..., Model]) -> None:
    with pytest.raises(ConfigError, match=r"unknown lint target 'tensorrt-12' .did you mean"):
        lint_model(parsed(ROWS, "y", "y = Neg(x)"), "tensorrt-12")
