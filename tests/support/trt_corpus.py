"""The models of lint rules for TensorRT, as ONNX text: for each rule one that breaks it, and a similar one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from qdqspec.graph.model import Model

F32 = np.float32
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.integers(-64, 65, (16, 16, 3, 3)).astype(np.int8)
MATRIX = RANDOM.integers(-64, 65, (16, 16)).astype(np.int8)

# Constants that every text may use; a test may add or replace some.
CONSTANTS: dict[str, np.ndarray] = {
    "s": np.array(0.05, F32), "s2": np.array(0.07, F32), "z": np.array(0, np.int8), "zu": np.array(128, np.uint8),
    "z0": np.array(0, np.uint8), "w": WEIGHT, "ws": np.full(16, 0.01, F32), "wz": np.zeros(16, np.int8),
    "m": MATRIX, "b": np.zeros(16, F32), "bi": np.arange(16, dtype=np.int32),
    "bs": np.full(16, 0.05 * 0.01, F32), "fw": WEIGHT.astype(F32),
}  # fmt: skip


def parse(inputs: str, outputs: str, nodes: str, opset: int = 21, **constants: np.ndarray) -> Model:
    """The model with these inputs, outputs and nodes; it has the `CONSTANTS` that it reads, and those given."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "trt": 1]>'
    ends = ", ".join(f"float {name}" for name in outputs.split(", "))
    proto = onnx.parser.parse_model(f"{head} g ({inputs}) => ({ends}) {{ {nodes} }}")
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    read = {name for node in proto.graph.node for name in node.input}
    known = CONSTANTS | constants
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(known[name]), name) for name in sorted(read & known.keys())
    )
    proto.ir_version = 10 if opset < 23 else 11
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.output[0]}:{node.op_type}:{index}"
    return Model(proto)


IMAGE = "float[1,16,8,8] x"
ROWS = "float[4,16] x"
QX = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z) "
RELU = "r = Relu(x)  q = QuantizeLinear(r, s, z)  a = DequantizeLinear(q, s, z) "
DW = "v = DequantizeLinear<axis = 0>(w, ws, wz) "
CONV = QX + DW + "c = Conv<pads = [1, 1, 1, 1]>(a, v) "
FP8 = {"z": np.zeros((), ml_dtypes.float8_e4m3fn)}


def two(name: str, source: str, scale: str = "s", zero: str = "z") -> str:
    """A pair on ``source`` with output ``name``."""
    return f"q{name} = QuantizeLinear({source}, {scale}, {zero})  {name} = DequantizeLinear(q{name}, {scale}, {zero}) "


def skip(on_skip: bool, on_conv: bool) -> str:
    """A residual block of one convolution, with pairs on the requested tensors."""
    text = CONV + (two("l", "c") if on_conv else "") + (two("r", "x", "s2") if on_skip else "")
    left, right = ("l" if on_conv else "c"), ("r" if on_skip else "x")
    return text + f"t = Add({left}, {right})  u = Relu(t) " + two("o", "u") + "y = Neg(o)"


DEPTHWISE = "depthwise = Conv<group = 16, pads = [1, 1, 1, 1]>(a, dv) "
POINTWISE = {"dw": np.ones((16, 1, 3, 3), np.int8), "pw": np.ones((16, 16, 1, 1), np.int8)}
SEPARABLE = QX + "dv = DequantizeLinear(dw, s, z) " + DEPTHWISE + "r = Relu(depthwise) "
BLOCKED_DQ = "a = DequantizeLinear<axis = 1, block_size = 8>(q, t, u) "
SPLIT = "p, r = Split(a, halves) "
HALVES = {"halves": np.array([2, 2])}


def four(rows: int, block: int) -> dict[str, np.ndarray]:
    """An int4 weight of ``rows`` by 16 in blocks."""
    return {
        "t": np.ones((-(-rows // block), 16), F32),
        "h": np.zeros((rows, 16), np.int8).astype(ml_dtypes.int4),
    }


def attention(*, q: bool, p: bool) -> str:
    """Two products around a Softmax; ``q`` quantizes the inputs of the first, ``p`` those of the second."""
    text = two("qa", "x") + two("ka", "k") + "d = MatMul(qa, ka) " if q else "d = MatMul(x, k) "
    text += "e = Mul(d, s)  f = Softmax(e) "
    return text + (two("pa", "f") + two("va", "n") + "y = MatMul(pa, va)" if p else "y = MatMul(f, n)")


# MXFP8 with TensorRT's operators.
COMES = ("q, e = trt.TRT_MXFP8DynamicQuantize<axis = -1, block_size = 32, output_dtype = 17>(x)  "
         "a = trt.TRT_MXFP8DequantizeLinear<axis = -1, block_size = 32, output_dtype = 1>(q, e) ")  # fmt: skip
EIGHT = {"e8": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn), "f": FP8["z"]}
QKV = "float[1,2,16,64] q, float[1,2,16,64] k, float[1,2,16,64] v"
STEPS = "float[4,2,8] x, bool p"
RECURRENT = {"W": np.ones((1, 32, 8), F32)}


def branch(op: str, read: str) -> str:
    """A recurrent operator in a branch of If: the largest of the results of all steps, or of the last one."""
    return (
        f"V = Identity(W)  y = If (p) <then_branch = then () => (float m) {{ "
        f"Y, Y_h = {op}<hidden_size = 8>(x, V, V)  m = ReduceMax<keepdims = 0>({read}) }}, "
        "else_branch = otherwise () => (float n) { n = ReduceMax<keepdims = 0>(x) }>"
    )


def again(scale: str) -> str:
    """A tensor in int8, moved and quantized to fp8."""
    return (
        QX
        + f"t = Transpose(a)  e = QuantizeLinear(t, {scale}, f)  d = DequantizeLinear(e, {scale}, f)  y = Neg(d)"
    )


def neg(scale: str = "s", zero: str = "z") -> str:
    """The input with a pair of these numbers."""
    return f"q = QuantizeLinear(x, {scale}, {zero})  a = DequantizeLinear(q, {scale}, {zero})  y = Neg(a)"


def in_blocks(size: int) -> str:
    """A product with a weight in blocks."""
    return f"v = DequantizeLinear<axis = 0, block_size = {size}>(h, t)  y = MatMul(x, v)"


DECONV = QX + "v = DequantizeLinear(w, s, z)  y = "
BY_FOUR = "v = DequantizeLinear<axis = 0, block_size = 64>(h, t)  y = MatMul(p, v)"
SQUARES = "float[16,16] x, float[16,16] k, float[16,16] n"
Case = tuple[str, str, dict[str, np.ndarray]]  # inputs, nodes, constants
PLAIN: Case = (ROWS, neg(), {})
PLAIN_CONV: Case = (IMAGE, CONV + "y = Neg(c)", {})

# rule: (a model that breaks it, a model that does not)
CASES: dict[str, tuple[Case, Case]] = {
    "TRT001": ((ROWS, neg("s", "zu"), {}), PLAIN),
    "TRT002": ((IMAGE, CONV + "y = Neg(c)", {"ws": np.r_[np.full(15, 0.01), 0].astype(F32)}), PLAIN_CONV),
    "TRT003": ((ROWS + ", float t", neg("t", "z"), {}), PLAIN),
    "TRT004": (
        (IMAGE, QX + DW + "d = DequantizeLinear<axis = 0>(bi, bs)  y = Conv(a, v, d)", {}),
        (IMAGE, QX + DW + "y = Conv(a, v, b)", {}),
    ),
    "TRT005": ((ROWS, neg(), {"z": np.array(0, np.int16)}), (ROWS, neg(), FP8)),
    "TRT006": ((ROWS, neg("s", "z0"), {}), PLAIN),
    "TRT007": (
        (ROWS, neg("ws", "wz"), {}),
        (IMAGE, "q = QuantizeLinear<axis = 0>(fw, ws, wz) " + DW.replace("(w", "(q") + "y = Conv(x, v)", {}),
    ),
    "TRT008": (
        (IMAGE, QX + DW.replace("axis = 0", "axis = 1") + "y = Conv(a, v)", {}),
        (IMAGE, QX + DW.replace("axis = 0", "axis = 1") + "y = ConvTranspose(a, v)", {}),
    ),
    "TRT010": (
        (ROWS, "v = DequantizeLinear<axis = 0, block_size = 8>(m, t, u)  y = MatMul(x, v)",
         {"t": np.ones((2, 16), F32), "u": np.zeros((2, 16), np.int8)}),
        (ROWS, in_blocks(8),
         {"t": np.ones((2, 16), F32), "h": np.zeros((16, 16), np.int8).astype(ml_dtypes.int4)}),
    ),
    "TRT013": ((ROWS, neg("s", "wz"), {}), (ROWS, neg("s", "z1"), {"z1": np.zeros(1, np.int8)})),
    "TRT014": (
        (ROWS, QX + "v = DequantizeLinear(m, ws, wz)  y = MatMul(a, v)", {}),
        (ROWS, QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)", {}),
    ),
    "TRT015": (
        (ROWS, in_blocks(8),
         {"t": np.ones((2, 16)).astype(ml_dtypes.float8_e8m0fnu),
          "h": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn)}),
        (ROWS, in_blocks(8),
         {"t": np.ones((2, 16), F32), "h": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn)}),
    ),
    "TRT016": (("float[4,128] x", in_blocks(32), four(128, 32)), ("float[4,128] x", in_blocks(64), four(128, 64))),
    "TRT011": (
        (ROWS, "q = QuantizeLinear(x, s, z)  i = MatMulInteger(q, m)  y = Cast<to = 1>(i)", {}),
        (ROWS, QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)", {}),
    ),
    "TRT012": (
        (ROWS, QX.replace("= Q", "= com.microsoft.Q").replace("= D", "= com.microsoft.D") + "y = Neg(a)", {}),
        PLAIN,
    ),
    "TRT021": ((ROWS, neg(), FP8), PLAIN),
    "TRT030": ((IMAGE, QX + "y = Conv(a, fw)", {}), PLAIN_CONV),
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
        (ROWS, two("a", "x") + two("d", "k") + "t = Mul(a, d) " + two("o", "t") + "y = Transpose(o)",
         {"k": np.ones((4, 16), F32)}),
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
        (IMAGE, DECONV + "Conv<group = 4>(a, v)",
         {"w": np.ones((16, 4, 1, 1), np.int8)}),
        (IMAGE, DECONV + "Conv(a, v)", {"w": np.ones((12, 16, 3, 3), np.int8)}),
    ),
    "TRT041": (
        (IMAGE, DECONV + "Conv(a, v)",
         {**FP8, "w": np.ones((16, 16, 6, 6)).astype(ml_dtypes.float8_e4m3fn)}),
        (IMAGE, DECONV + "Conv(a, v)",
         {**FP8, "w": np.ones((16, 16, 5, 5)).astype(ml_dtypes.float8_e4m3fn)}),
    ),
    "TRT042": (PLAIN, ("float16[4,16] x", QX + "n = Neg(a)  y = Cast<to = 1>(n)", {"s": np.array(0.05, np.float16)})),
    "TRT043": ((SQUARES, attention(q=True, p=False), {}), (SQUARES, attention(q=True, p=True), {})),
    "TRT044": ((ROWS, QX + "y = Softmax(a)", {}), (ROWS, QX + "t = Softmax(a)  u = Neg(a)  y = Add(t, u)", {})),
    "TRT046": (
        (IMAGE, CONV + two("d", "c") + "y = Relu(d)", {}),
        (IMAGE, CONV + "t = Relu(c) " + two("d", "t") + "y = Neg(d)", {}),
    ),
    "TRT047": (
        (ROWS, two("a", "x") + two("d", "a", "s2") + "y = Neg(d)", {}),
        (ROWS, two("a", "x") + two("d", "a") + "y = Neg(d)", {}),
    ),
    "TRT048": (
        (IMAGE, skip(True, False) + "  p = GlobalAveragePool(u)", {}),
        (IMAGE, skip(True, False) + "  p = GlobalAveragePool(o)", {}),
    ),
    "TRT049": ((IMAGE, CONV + "y = Gelu(c)", {}), (IMAGE, CONV + "t = Gelu(c) " + two("d", "t") + "y = Neg(d)", {})),
    "TRT050": (
        (IMAGE, SEPARABLE + "y = Conv(r, fp)", {**POINTWISE, "fp": np.ones((16, 16, 1, 1), F32)}),
        (IMAGE, SEPARABLE + two("d", "r") + "v = DequantizeLinear(pw, s, z)  y = Conv(d, v)", POINTWISE),
    ),
    "TRT051": (
        (IMAGE, CONV + two("d", "x") + "g = GlobalAveragePool(d) " + two("e", "g") + "t = Add(c, e) " + two("o", "t")
         + "y = Neg(o)", {}),
        (IMAGE, skip(True, False), {}),
    ),
    "TRT052": (
        (IMAGE, SEPARABLE + "e = Sigmoid(depthwise)  y = Mul(depthwise, e)", POINTWISE),
        (IMAGE, CONV + "e = Sigmoid(c)  y = Mul(c, e)", {}),
    ),
    "TRT045": ((IMAGE, DECONV + "Conv(a, v)", {}), PLAIN_CONV),
    "TRT018": ((ROWS + ", int8 t", neg("s", "t"), {}), (ROWS + ", float t", neg("t", "z"), {})),
    "TRT025": (("float[4,4] x", "y = Det(x)", {}), (ROWS, "y = Neg(x)", {})),
    "TRT029": ((SQUARES, "y = com.microsoft.FusedMatMul(x, k)", {}), (SQUARES, "y = com.microsoft.Gelu(x)", {})),
    "TRT053": ((ROWS, "y = com.microsoft.Gelu(x)", {}), (SQUARES, "y = com.microsoft.FusedMatMul(x, k)", {})),
    "TRT054": ((IMAGE, skip(False, True), {}), (IMAGE, skip(True, False), {})),
    "TRT055": (
        (IMAGE, DECONV + "ConvTranspose(a, v)",
         {**FP8, "w": np.ones((16, 16, 3, 3)).astype(ml_dtypes.float8_e4m3fn)}),
        (IMAGE, DECONV + "Conv(a, v)",
         {**FP8, "w": np.ones((16, 16, 3, 3)).astype(ml_dtypes.float8_e4m3fn)}),
    ),
    "TRT056": (
        (ROWS, QX + "q2 = QuantizeLinear(a, s, f)  d = DequantizeLinear(q2, s, f)  y = Neg(d)", {"f": FP8["z"]}),
        (ROWS, neg(), FP8),
    ),
    "TRT060": (
        ("float[2,3,4,64] x", COMES + "y = Neg(a)", {}),  # four dimensions
        ("float[3,4,64] x", COMES + "y = Neg(a)", {}),
    ),
    "TRT061": (
        (ROWS, QX + "v = DequantizeLinear(k, s, z)  y = Add(a, v)", {"k": np.array(9, np.int8)}),
        (ROWS, QX + "v = DequantizeLinear(k, s, z)  y = Add(a, v)", {"k": np.array([9], np.int8)}),
    ),
    "TRT062": (
        (ROWS, QX + "v = DequantizeLinear(e8, s, f)  t = Transpose(v)  y = MatMul(a, t)", EIGHT),
        (ROWS, QX + "r = Relu(a)  v = DequantizeLinear(e8, s, f)  y = MatMul(r, v)", EIGHT),
    ),
    "TRT063": ((ROWS, again("s"), EIGHT), (ROWS, again("s2"), EIGHT)),
    "TRT064": (
        ("float[2,4,128] x", QX + "p = Neg(a) " + BY_FOUR, four(128, 64)),
        ("float[2,4,128] x", QX + "p = Relu(a) " + BY_FOUR, four(128, 64)),
    ),
    "TRT065": (
        (QKV, "y = Attention(q, k, v)", {}),
        (QKV.replace("float", "float16"), "t = Attention(q, k, v)  y = Cast<to = 1>(t)", {}),
    ),
    "TRT070": (
        (QKV, "t = Cast<to = 10>(q)  c = Identity(t)  u = Attention(t, c, t)  y = Cast<to = 1>(u)", {}),
        (QKV.replace("float", "float16"), "t = Attention(q, k, k)  y = Cast<to = 1>(t)", {}),
    ),
    "TRT071": (
        ("int64[4] x", "r = Gather(k, x)  y = DequantizeLinear(r, s, z)", {"k": np.ones((16, 8), np.int8)}),
        ("int64[4] x", "r = DequantizeLinear(k, s, z)  y = Gather(r, x)", {"k": np.ones((16, 8), np.int8)}),
    ),
    "TRT073": (
        ("uint8[1,8,8,3] x", "t = Transpose<perm = [0, 3, 1, 2]>(x)  y = Cast<to = 1>(t)", {}),
        ("uint8[1,8,8,3] x", "t = Cast<to = 1>(x)  y = Transpose<perm = [0, 3, 1, 2]>(t)", {}),
    ),
    "TRT074": (
        (ROWS, RELU + "v = DequantizeLinear(m, s, z)  c = Concat<axis = 0>(v, a)  y = Neg(c)", {}),
        (ROWS, RELU + two("v", "fm") + "c = Concat<axis = 0>(v, a)  y = Neg(c)", {"fm": MATRIX.astype(F32)}),
    ),
    "TRT066": ((STEPS, branch("LSTM", "Y_h"), RECURRENT), (STEPS, branch("LSTM", "Y"), RECURRENT)),
}  # fmt: skip

NEWER = {"TRT065": 23, "TRT070": 23}  # opsets of cases
ONE_BLOCK = {"t": np.ones((1, 1), F32), "h": np.zeros((64, 1)).astype(ml_dtypes.int4)}
HALVED = {"halves": np.array([1, 1, 0.5, 0.5], F32)}
WRITTEN = {"i": np.array([[1]]), "r": np.ones((1, 16), F32)}
NEAR_MISSES: list[tuple[str, bool, Case]] = [
    # rule, whether it is broken, model
    ("TRT007", False, (IMAGE, QX + DW + "y = Conv(a, v)", {})),
    ("TRT008", True, (IMAGE, QX + DW + "y = Conv(a, v)", {"ws": np.ones(15, F32), "wz": np.zeros(15, np.int8)})),
    ("TRT010", True, (ROWS, "q = QuantizeLinear<axis = 1, block_size = 8>(x, t, u) " + BLOCKED_DQ + "y = Neg(a)",
     {"t": np.ones((4, 2), F32), "u": np.zeros((4, 2)).astype(ml_dtypes.float8_e4m3fn)})),
    ("TRT010", True, ("float[4,96] x", in_blocks(64),
     four(96, 64))),
    ("TRT010", False, ("float[4,128] x", in_blocks(64),
     four(128, 64))),
    ("TRT010", True, ("float[4,64] x", in_blocks(64), ONE_BLOCK)),
    ("TRT010", False, ("float[4,64] x", in_blocks(64), four(64, 64))),
    ("TRT010", True, ("float[5,7] x", "v = DequantizeLinear(h, s)  w2 = Transpose(v)  y = MatMul(x, w2)",
     {"h": np.zeros((5, 7), np.int8).astype(ml_dtypes.int4)})),
    ("TRT010", False, ("float[4,7] x", "v = DequantizeLinear(h, s)  w2 = Transpose(v)  y = MatMul(x, w2)",
     {"h": np.zeros((4, 7), np.int8).astype(ml_dtypes.int4)})),
    ("TRT054", False, (IMAGE, CONV + two("l", "c") + "e = Conv<pads = [1, 1, 1, 1]>(x, fw)  t = Add(l, e) "
     + two("o", "t") + "y = Neg(o)", {})),
    ("TRT035", True, (ROWS, QX + SPLIT + two("d", "p") + two("e", "r", "s2") + "y = Sub(d, e)", HALVES)),
    ("TRT035", False, (ROWS, QX + SPLIT + two("d", "p") + two("e", "r") + "y = Sub(d, e)", HALVES)),
    ("TRT035", True, (ROWS, QX + two("d", "k") + "j = Concat<axis = 0>(a, d) " + two("o", "j", "s2") + "y = Neg(o)",
     {"k": np.ones((4, 16), F32)})),
    ("TRT037", True, (ROWS, two("a", "x") + "y = Sigmoid(a)", {})),
    ("TRT037", False, (ROWS, two("a", "x") + "t = Sigmoid(a) " + two("o", "t") + "y = Transpose(o)", {})),
    ("TRT037", False, (ROWS, two("a", "x") + "y = Transpose(a)", {})),
    ("TRT037", False, (IMAGE, two("a", "x") + "y = GlobalAveragePool(a)", {})),
    ("TRT037", True, (IMAGE, CONV + two("r", "x", "s2") + "t = Add(c, r)  y = Relu(t)", {})),
    ("TRT040", False, ("float[1,3,8,8] x", DECONV + "Conv(a, v)",
     {"w": np.ones((8, 3, 3, 3), np.int8)})),
    ("TRT040", True, ("float[1,3,8,8] x", DECONV + "Conv(a, v)",
     {"w": np.ones((12, 3, 3, 3), np.int8)})),
    ("TRT040", False, (IMAGE, QX + "v = DequantizeLinear(dw, s, z)  y = Conv<group = 16>(a, v)", POINTWISE)),
    ("TRT040", True, ("float[1,64,8,8] x", DECONV + "Conv(a, v)",
     {**FP8, "w": np.ones((16, 64, 3, 3)).astype(ml_dtypes.float8_e4m3fn)})),
    ("TRT040", True, ("float[1,16] x", QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)", {})),
    ("TRT040", False, (ROWS, QX + "v = DequantizeLinear<axis = 1>(m, ws, wz)  y = MatMul(a, v)", {})),
    ("TRT040", True, ("float[8,8] x, float[8,8] k", two("a", "x") + two("d", "k") + "y = MatMul(a, d)", {})),
    ("TRT046", True, (IMAGE, CONV + two("d", "c") + "e = Sigmoid(d)  y = Mul(d, e)", {})),
    ("TRT046", True, (IMAGE, CONV + "e = Sigmoid(c) " + two("d", "e") + "y = Mul(c, d)", {})),
    ("TRT046", False, (IMAGE, CONV + two("d", "c") + DW.replace("v =", "v2 =") + "y = Conv(d, v2)", {})),
    ("TRT048", False, (IMAGE, "c = Conv(x, fw)  y = GlobalAveragePool(c)", {})),
    ("TRT049", True, (IMAGE, CONV + "t = Relu(c)  y = MaxPool<kernel_shape = [2, 2]>(t)", {})),
    ("TRT049", False, (IMAGE, CONV + "t = MaxPool<kernel_shape = [2, 2]>(c) " + two("d", "t") + "y = Neg(d)", {})),
    ("TRT065", True, ("float16[1,2,1,64] x, float16[1,2,9,64] k", "t = Attention(x, k, k)  y = Cast<to = 1>(t)", {})),
    ("TRT065", False, ("float16[1,2,2,64] x, float16[1,2,9,64] k", "t = Attention(x, k, k)  y = Cast<to = 1>(t)", {})),
    ("TRT073", True, (IMAGE, "y = AveragePool<kernel_shape = [2, 2], dilations = [2, 1]>(x)", {})),
    ("TRT073", False, (IMAGE, "y = AveragePool<kernel_shape = [2, 2], dilations = [1, 1]>(x)", {})),
    ("TRT073", True, (IMAGE, "y = Resize<mode = \"linear\", antialias = 1>(x, , halves)", HALVED)),
    ("TRT073", True, (IMAGE, "y = Resize<coordinate_transformation_mode = \"half_pixel_symmetric\">(x, , halves)",
     HALVED)),
    ("TRT073", False, (IMAGE, "y = Resize<mode = \"linear\", exclude_outside = 1>(x, , halves)", HALVED)),
    ("TRT073", True, ("float[4,5000] x", "y, i = TopK(x, k)", {"k": np.array([3841])})),
    ("TRT073", False, ("float[4,5000] x", "y, i = TopK(x, k)", {"k": np.array([3840])})),
    ("TRT073", True, (ROWS, "y = ScatterND<reduction = \"add\">(x, i, r)", WRITTEN)),
    ("TRT073", False, (ROWS, "y = ScatterND<reduction = \"none\">(x, i, r)", WRITTEN)),
    ("TRT073", True, (IMAGE, "y, i = MaxPool<kernel_shape = [2, 2]>(x)", {})),
    ("TRT073", True, ("float[7] x", "y = Softmax(x)", {})),
    ("TRT073", True, ("bool[4,16] x", "t = ReduceMax(x)  y = Cast<to = 1>(t)", {})),
    ("TRT073", True, ("bfloat16[4,16] x", "t = Mish(x)  y = Cast<to = 1>(t)", {})),
    ("TRT073", False, ("float16[4,16] x", "t = Mish(x)  y = Cast<to = 1>(t)", {})),
    ("TRT073", True, (ROWS, "t = Cast<to = 5>(x)  y = Cast<to = 1>(t)", {})),
    ("TRT073", True, (ROWS, "t = Cast<to = 17>(x)  y = Cast<to = 1>(t)", {})),
    ("TRT073", False, (ROWS, "t = Cast<to = 3>(x)  y = Cast<to = 1>(t)", {})),
]  # fmt: skip


def kernel(*sides: int) -> Case:
    weight = np.ones((16, 16, *sides)).astype(ml_dtypes.float8_e4m3fn)
    return "float[1,16,40,40] x", DECONV + "Conv(a, v)", FP8 | {"w": weight}


def pool(op: str, numbers: dict[str, np.ndarray]) -> Case:
    return IMAGE, QX + f"y = {op}<kernel_shape = [2, 2]>(a)", numbers


WHOLE = attention(q=True, p=True)
# Rules of TensorRT for RTX that find other models than those of TensorRT.
RTX_CASES: dict[str, tuple[Case, Case]] = {
    "TRT008": (
        (IMAGE, QX + DW + "y = Conv(a, v)", {"ws": np.full(8, 0.01, F32), "wz": np.zeros(8, np.int8)}),
        (IMAGE, QX + DW.replace("axis = 0", "axis = 1") + "y = Conv(a, v)", {}),
    ),
    "TRT010": (("float[4,96] x", in_blocks(64), four(96, 64)), CASES["TRT010"][0]),  # blocks of int8 build
    "TRT041": (kernel(3, 11), kernel(4, 8)),
    "TRT043": (
        (SQUARES, WHOLE, {}),
        (SQUARES, WHOLE.replace("y =", "o =") + " " + two("r", "o") + "y = Neg(r)", {}),
    ),
    "TRT055": ((IMAGE, DECONV + "ConvTranspose(a, v)", {}), (IMAGE, DECONV + "Conv(a, v)", {})),
    "TRT068": CASES["TRT008"],
    "TRT069": (pool("MaxPool", FP8), pool("MaxPool", {})),
    "TRT072": ((ROWS, "n = NonZero(x)  y = Cast<to = 1>(n)", {}), (ROWS, "y = Neg(x)", {})),
}

TOKENS = "float[1,8,64] x, float[1,8,64] k, float[1,8,64] n"
CACHED = "float16[1,8,64] x, float16[1,8,32] k, float16[1,8,32] n, float16[1,2,8,16] pk, float16[1,2,8,16] pv"
GAIN = {"g": np.ones(64, np.float32)}
# Operators of ONNX Runtime with an importer in TensorRT for RTX, and the rule there that their model breaks, if any:
# some importers need a plugin that the library does not have.
IMPORTED: dict[str, tuple[set[str], Case]] = {
    "MultiHeadAttention": (set(), (TOKENS, "y = com.microsoft.MultiHeadAttention<num_heads = 4>(x, k, n)", {})),
    "SimplifiedLayerNormalization": (
        set(), (TOKENS, "y = com.microsoft.SimplifiedLayerNormalization(x, g)", GAIN),
    ),
    "SkipSimplifiedLayerNormalization": (
        set(), (TOKENS, "y = com.microsoft.SkipSimplifiedLayerNormalization(x, k, g)", GAIN),
    ),
    "GroupQueryAttention": (
        {"TRT029"},
        (CACHED, ("t, u, w = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, scale = 0.25>"
          "(x, k, n, pk, pv, last, total)  y = Cast<to = 1>(t)"),
         {"last": np.array([7], np.int32), "total": np.array(8, np.int32)}),
    ),
    "MatMulNBits": (
        {"TRT011"},
        (CACHED, ("t = com.microsoft.MatMulNBits<K = 64, N = 32, bits = 4, block_size = 32>(x, w4, s4)  "
          "y = Cast<to = 1>(t)"), {"w4": np.full((32, 2, 16), 0x88, np.uint8), "s4": np.ones(64, np.float16)}),
    ),
}  # fmt: skip
