"""Each lint rule for ONNX Runtime, and the behaviour of the installed version that the rule states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import trt_corpus
from onnx.reference import ReferenceEvaluator
from onnx_text import kernels_of, outputs_of
from onnxruntime.quantization import QuantType, quantize_dynamic
from packaging.version import Version
from random_models import random_inputs, runs
from trt_corpus import DW, F32, IMAGE, ROWS, parse

from qdqspec.backends.onnxruntime.lint import TARGETS
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.qdq.strip import strip_qdq

QX = "q = QuantizeLinear(x, s, zu)  a = DequantizeLinear(q, s, zu) "
DM = "v = DequantizeLinear<axis = 1>(m, ws, wz) "
CONV = QX + DW + "c = Conv<pads = [1, 1, 1, 1]>(a, v) "
POOL = "p = MaxPool<kernel_shape = [2, 2]>(a) "
two = partial(trt_corpus.two, zero="zu")  # the text of a pair

DB = "d = DequantizeLinear<axis = 0>(bi, bs) "
BIASED = QX + DW + DB + "c = Conv<pads = [1, 1, 1, 1]>(a, v, d) " + two("o", "c")


def ids(model: Model) -> set[str]:
    return {finding.id for finding in lint_model(model, "onnxruntime-cpu")}


def right(model: Model) -> bool:
    """Whether outputs equal those of the reference implementation within two steps."""
    feeds = random_inputs(model)
    expected = ReferenceEvaluator(model.proto).run(None, feeds)[0]
    return bool(np.abs(outputs_of(model, feeds, "ENABLE_ALL")[0] - expected).max() < 0.1)


Case = tuple[str, str, dict[str, np.ndarray]]  # inputs, nodes, constants; the opset if it matters


def pair(
    inputs: str,
    bad: str,
    good: str = "",
    *,
    wrong: dict[str, object] | None = None,
    fixed: dict[str, object] | None = None,
    good_inputs: str = "",
) -> tuple[Case, Case]:
    """A model that breaks a rule and one that does not, with the constants of each."""
    return (inputs, bad, wrong or {}), (good_inputs or inputs, good or bad, fixed or {})


FP8 = {"zu": np.zeros((), ml_dtypes.float8_e4m3fn)}
INT4 = {"h": np.ones((16, 16), np.int8).astype(ml_dtypes.int4), "t": np.ones((1, 16), F32)}
FP4 = {"h": np.ones((16, 16)).astype(ml_dtypes.float4_e2m1fn), "t": np.ones((1, 16), F32)}
CUBE = {"m3": np.ones((2, 16, 16), np.int8)}
DM3 = "v = DequantizeLinear<axis = 2>(m3, ws, wz) "
GEMM = QX + DM + DB + "y = Gemm(a, v, d)"
BLOCKS = "v = DequantizeLinear<axis = 0, block_size = 16>(h, t) "
ROW_BLOCKS = BLOCKS.replace("axis = 0", "axis = 1")
FP8_OPERATORS = "q = trt.TRT_FP8QuantizeLinear(x, s)  a = trt.TRT_FP8DequantizeLinear(q, s)  y = Tanh(a)"
END = two("o", "c") + "y = Neg(o)"
END_T = two("o", "t") + "y = Neg(o)"
SUM = QX + "n = Neg(x) " + two("d", "n") + "t = Add(a, d) " + END_T

# rule: (a model that breaks it and one that does not, a property that only the second one has when built)
REFUSED: dict[str, tuple[tuple[Case, Case], Callable[[Model], bool]]] = {
    "ORT001": (pair(ROWS, GEMM, wrong={"bs": np.full(16, 0.5, F32)}), right),
    "ORT002": (pair("float[2,4,16] x", QX + DM3 + "y = MatMul(a, v)", QX + DM + "y = MatMul(a, v)", wrong=CUBE), runs),
    "ORT005": (pair(ROWS, BLOCKS + "y = MatMul(x, v)", wrong=FP4 | {"opset": 23}, fixed=INT4 | {"opset": 23}), runs),
    "ORT008": (pair(ROWS, QX + "y = Tanh(a)", wrong=FP8 | {"opset": 17}, fixed=FP8 | {"opset": 19}), runs),
    "ORT007": (pair(ROWS, FP8_OPERATORS, QX + "y = Tanh(a)", fixed=FP8), runs),
}  # fmt: skip

# rule: (a model that breaks it, a model that does not); versions that do not fuse the first one have ORT014 instead
MISFITS = {
    "ORT004": pair(ROWS, SUM, wrong={"s": np.full(1, 0.05, F32), "zu": np.full(1, 128, np.uint8)}),
    "ORT006": pair(
        ROWS, QX + "v = DequantizeLinear(h, s)  y = MatMul(a, v)", QX + "y = Tanh(a)",
        wrong=FP8 | {"h": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn)}, fixed=FP8,
    ),
    "ORT002": pair(
        "float[2,4,16] x", QX + DM3 + "t = MatMul(a, v) " + END_T, QX + DM + "t = MatMul(a, v) " + END_T, wrong=CUBE
    ),
}  # fmt: skip
LEAVES_MISFITS = Version(version("onnxruntime")) >= Version("1.32")


def moved(operator: str, made: str = "p") -> str:
    """A convolution, operators that move its values, and the pair of the result."""
    return CONV + f"{made} = {operator} " + two("o", "p", zero="z0") + "y = Neg(o)"


# rule: (a model that breaks it and one that does not, the kernel that only the second one has, or with a "+" only the
# first one)
SLOW: dict[str, tuple[tuple[Case, Case], str]] = {
    "ORT010": (
        pair(IMAGE, CONV.replace("zu", "z") + two("o", "c", zero="z") + "y = Add(a, o)", CONV + END),
        "QLinearConv",
    ),
    "ORT011": (pair(IMAGE, CONV + END, wrong={"zu": np.array(9, np.uint16)}), "QLinearConv"),
    "ORT012": (
        pair(ROWS, ROW_BLOCKS + "y = Gemm<transB = 1>(x, v)", BLOCKS + "y = Gemm(x, v)",
             wrong=INT4 | {"t": np.ones((16, 1), F32)}, fixed=INT4),
        "MatMulNBits",
    ),
    "ORT018": (pair(IMAGE, BIASED + "y = Neg(o)", wrong={"bs": np.full(16, 0.5, F32)}), "QLinearConv"),
    "ORT031": (
        pair(IMAGE, BIASED.replace(DB, "d = DequantizeLinear(b8, s) ") + "y = Neg(o)", BIASED + "y = Neg(o)",
             wrong={"b8": np.ones(16, np.int8)}),
        "QLinearConv",
    ),
    "ORT020": (pair(IMAGE, CONV + "y = Sigmoid(c)", CONV + two("o", "c") + "y = Sigmoid(o)"), "QLinearConv"),
    "ORT020, a pair behind an operator that copies values": (
        pair(IMAGE, moved("DepthToSpace<blocksize = 2>(c)"), moved("MaxPool<kernel_shape = [2, 2]>(c)")), "QLinearConv"
    ),
    "ORT020, a pair behind two such operators": (
        pair(IMAGE, moved("Flatten(c)"), moved("Relu(c)  p = Transpose(r)", "r")), "QLinearConv"
    ),
    "ORT021": (pair(ROWS, QX + "n = Neg(x) " + two("d", "n") + "y = Add(a, d)", SUM), "QLinearAdd"),
    "ORT024": (pair(ROWS, QX + DM + "y = Gemm(a, v, b)", GEMM, wrong={"b": np.ones(16, F32)}), "QGemm"),
    "ORT025": (
        pair(ROWS, QX + "t = Mul(a, s2) " + END_T, QX + "d = DequantizeLinear(z0, s2)  t = Mul(a, d) " + END_T),
        "QLinearMul",
    ),
    "ORT029": (
        pair("float16[1,16,8,8] x", CONV + two("o", "c") + "n = Neg(o)  y = Cast<to = 1>(n)", CONV + END,
             wrong={"s": np.array(0.05, np.float16), "ws": np.full(16, 0.01, np.float16)}, good_inputs=IMAGE),
        "QLinearConv",
    ),
    "ORT027": (
        pair(IMAGE, CONV + two("o", "c") + "r = Relu(o) " + two("u", "r") + "y = Neg(u)",
             CONV + "r = Relu(c) " + two("u", "r", zero="z0") + "y = Neg(u)"),
        "+Relu",
    ),
    "ORT028": (  # ReorderInput is for the float layout of the output
        pair(IMAGE, QX + POOL + two("o", "p") + "y = Neg(o)", wrong={"opset": 11}, fixed={"opset": 12}), "+ReorderInput"
    ),
    "ORT017": (pair(IMAGE, QX + "t = Conv(a, fw) " + END_T, QX + "t = Conv(a, fw)  y = Neg(t)"), "+QLinearConv"),
    "ORT022": (pair(ROWS, QX + "t = Tanh(a) " + END_T, QX + "t = Sigmoid(a) " + END_T), "+Tanh"),
    "ORT023": (pair(IMAGE, DW + "y = Conv(x, v)", "y = Conv(x, fw)"), "+DequantizeLinear"),
}  # fmt: skip


def made(case: Case) -> Model:
    inputs, nodes, constants = case
    opset = int(constants.get("opset", 21))
    return parse(inputs, "y", nodes, opset, **{k: v for k, v in constants.items() if k != "opset"})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_fail_or_have_wrong_outputs(name: str) -> None:
    cases, holds = REFUSED[name]
    for case, broken in zip(cases, (True, False), strict=True):
        assert (name in ids(made(case))) == broken
        assert holds(made(case)) != broken


@pytest.mark.parametrize("name", MISFITS)
def test_models_that_cannot_be_fused_are_refused_or_run_in_float(name: str) -> None:
    bad, good = (made(case) for case in MISFITS[name])
    assert ids(bad) & {name, "ORT014"} == {"ORT014" if LEAVES_MISFITS else name}
    assert runs(bad) == LEAVES_MISFITS
    assert not ids(good) & {name, "ORT014"}
    assert runs(good)


def test_rules_hold_for_ranges_of_versions() -> None:
    known = {rule.id: rule for rule in rules_for("onnxruntime-cpu")}
    for name, old, new in (("ORT004", True, False), ("ORT014", False, True), ("ORT005", True, True)):
        assert known[name].holds_for(Version("1.31.1")) == old
        assert known[name].holds_for(Version("1.32.0")) == new
        assert known[name].holds_for(None) == new  # an unknown version is treated as the newest


@pytest.mark.parametrize("name", SLOW)
def test_models_of_slow_findings_lack_the_integer_kernel_or_have_an_additional_one(name, tmp_path) -> None:
    cases, kernel = SLOW[name]
    for case, broken in zip(cases, (True, False), strict=True):
        assert (name[:6] in ids(made(case))) == broken
        is_run = kernel.removeprefix("+") in kernels_of(made(case), tmp_path)
        assert is_run == (broken == kernel.startswith("+"))


@pytest.mark.parametrize(("outputs", "is_fused"), [("y", True), ("y, p", False)])
def test_a_product_that_is_itself_an_output_stays_apart_from_its_bias(outputs, is_fused, tmp_path) -> None:
    model = parse(ROWS, outputs, QX + DM + "p = MatMul(a, v)  y = Add(p, b)", b=np.ones(16, F32))
    assert ("ORT024" in ids(model)) == ("Gemm" in kernels_of(model, tmp_path)) == is_fused


def test_models_that_compute_in_float16_have_casts(tmp_path: Path) -> None:
    half = parse("float16[4,16] x", "y", "h = Exp(x)  y = Cast<to = 1>(h)")
    (finding,) = lint_model(half, "onnxruntime-cpu")
    assert (finding.id, finding.severity) == ("ORT030", "note")
    assert "Cast" in kernels_of(half, tmp_path)
    assert not ids(parse("float16[4,16] x", "y", "c = Cast<to = 1>(x)  y = Exp(c)"))


def test_all_outputs_of_a_split_need_the_scale_of_its_input(tmp_path: Path) -> None:
    split = QX + "p, r = Split<axis = 1, num_outputs = 2>(a) " + two("o", "p")
    count = {}
    for scale in ("s2", "s"):
        model = parse(IMAGE, "y", split + two("e", "r", scale) + "c = Concat<axis = 1>(o, e) y = Neg(c)")
        assert ("ORT026" in ids(model)) == (scale == "s2")
        count[scale] = kernels_of(model, tmp_path).count("DequantizeLinear")
    assert count["s2"] > count["s"]


@pytest.mark.parametrize(
    ("behind", "word"),
    [
        ("y = LeakyRelu(c)", "LeakyRelu"),
        (two("o", "c") + "y = Add(o, c)", "also reads it in float"),
        ("r = Relu(c) " + two("o", "r") + "y = Neg(o)", "stays: the zero point"),
        ("y = Relu(c)", "is an output of the model"),
    ],
)
def test_the_finding_names_why_a_convolution_outputs_float(behind: str, word: str, tmp_path: Path) -> None:
    model = parse(IMAGE, "y", CONV + behind)
    (found,) = [finding for finding in lint_model(model, "onnxruntime-cpu") if finding.id == "ORT020"]
    assert word in found.message
    assert "QLinearConv" not in kernels_of(model, tmp_path)


def test_saturation_is_reported_once_and_only_for_8_bits() -> None:
    text = CONV + two("o", "c") + "t = Conv(o, v) " + two("u", "t") + "y = Neg(u)"
    wide = parse(IMAGE, "y", text, w=np.full((16, 16, 3, 3), 127, np.int8))
    assert [f.message for f in lint_model(wide, "onnxruntime-cpu") if f.id == "ORT013"] == [
        "2 operators multiply uint8 data by int8 weights of 8 bits"
    ]
    assert "ORT013" not in ids(parse(IMAGE, "y", text))


WIDE = {"w": np.full((16, 16, 3, 3), 127, np.int8), "m": np.full((16, 16), 127, np.int8)}
QUANTIZED_WEIGHTS = {
    "transposed weight": (IMAGE, QX + "b = DequantizeLinear(w, s)  v = Transpose<perm = [1, 0, 2, 3]>(b)"
                                 "c = Conv(a, v) " + two("y", "c")),
    "moved data": (ROWS, QX + "t = Transpose(a)  v = DequantizeLinear(m, s) c = MatMul(t, v) " + two("y", "c")),
    "QLinearConv": (IMAGE, QX + "c = QLinearConv(q, s, zu, w, s, z, s, zu)  y = DequantizeLinear(c, s, zu)"),
    "QGemm": (ROWS, QX + "n = Transpose(m) y = com.microsoft.QGemm(q, s, zu, n, s, z)"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED_WEIGHTS)
def test_saturation_is_found_after_layout_changes_and_in_integer_operators(name: str) -> None:
    inputs, text = QUANTIZED_WEIGHTS[name]
    assert "ORT013" in ids(parse(inputs, "y", text, **WIDE))
    narrow = {key: (values // 2).astype(np.int8) for key, values in WIDE.items()}
    assert "ORT013" not in ids(parse(inputs, "y", text, **narrow))
    assert "ORT013" not in ids(parse(inputs, "y", text.replace("zu", "z"), **WIDE))


def test_a_bias_that_convolutions_of_different_scales_share_is_slow_for_one() -> None:
    other = "u = Conv<pads = [1, 1, 1, 1]>(n, v, d) " + two("e", "u")
    text = BIASED + two("n", "x", "t") + other + "y = Add(o, e)"
    model = parse(IMAGE, "y", text, t=np.array(0.75, F32))
    found = [f.node for f in lint_model(model, "onnxruntime-cpu") if f.id == "ORT018"]
    assert found == [node.name for node in model.nodes if "u" in node.outputs]


BIAS = "d = DequantizeLinear(bi, bt) "  # int32, with the product of both scales, if that is .05 * .01
BIASES = {"bt": np.array(0.0005, F32), "ws": np.array(0.01, F32), "s": np.array(0.05, F32)}
WRONG = {"bt": np.array(0.0015, F32)}
DV = "v = DequantizeLinear(w, ws, z) "
ROW_V = "v = DequantizeLinear(m, ws, z) "
# name: (inputs, nodes, constants, the finding if no integer kernel reads it, or reads it wrongly)
LAYOUTS: dict[str, tuple[str, str, dict[str, np.ndarray], str]] = {
    "bias": (IMAGE, DV + BIAS + "c = Conv(a, v, d) ", {}, ""),
    "bias behind Identity": (IMAGE, DV + BIAS + "e = Identity(d) c = Conv(a, v, e) ", {}, ""),
    "wrong bias behind Identity": (IMAGE, DV + BIAS + "e = Identity(d) c = Conv(a, v, e) ", WRONG, "ORT018"),
    "bias behind Reshape": (IMAGE, DV + BIAS + "e = Reshape(d, r16) c = Conv(a, v, e) ", {}, "ORT031"),
    "bias behind a pair": (IMAGE, DV + two("d", "b", zero="z") + "c = Conv(a, v, d) ", {}, "ORT031"),
    "weight behind Transpose": (IMAGE, DV + BIAS + "t = Transpose<perm = [1, 0, 2, 3]>(v) c = Conv(a, t, d) ", {}, ""),
    "weight behind Transpose, wrong bias":
        (IMAGE, DV + BIAS + "t = Transpose<perm = [1, 0, 2, 3]>(v) c = Conv(a, t, d) ", WRONG, "ORT018"),
    "weight behind Reshape": (IMAGE, DV + "t = Reshape(v, same) c = Conv(a, t) ", {}, "ORT023"),
    "data behind Transpose": (IMAGE, DV + "t = Transpose<perm = [0, 1, 3, 2]>(a) c = Conv(t, v) ", {}, ""),
    "data behind Slice": (IMAGE, DV + "t = Slice(a, low, high) c = Conv(t, v) ", {}, ""),
    "data behind DepthToSpace":
        ("float[1,64,8,8] x", DV + "t = DepthToSpace<blocksize = 2>(a) c = Conv(t, v) ", {}, "ORT023"),
    "Gemm, wrong bias behind Identity": (ROWS, ROW_V + BIAS + "e = Identity(d) c = Gemm(a, v, e) ", WRONG, "ORT001"),
    "Gemm, weight behind Transpose, wrong bias":
        (ROWS, ROW_V + BIAS + "t = Transpose(v) c = Gemm(a, t, d) ", WRONG, "ORT001"),
    "Gemm, bias behind Reshape": (ROWS, ROW_V + BIAS + "e = Reshape(d, r16) c = Gemm(a, v, e) ", {}, "ORT031"),
    "MatMul, weight behind Squeeze":
        (ROWS, "v = DequantizeLinear(m1, ws, z) t = Squeeze(v, first) c = MatMul(a, t) ", {}, "ORT023"),
    "MatMul, data behind Reshape": (ROWS, ROW_V + "t = Reshape(a, rows) c = MatMul(t, v) ", {}, ""),
}  # fmt: skip


@pytest.mark.skipif(not LEAVES_MISFITS, reason="before 1.32 other pairs were fused")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_operators_between_a_dq_and_its_operator_are_judged_as_the_runtime_fuses_them(name, tmp_path):
    inputs, text, changed, finding = LAYOUTS[name]
    random = np.random.default_rng(1)
    constants = {
        "w": random.integers(-60, 60, (16, 16, 3, 3)).astype(np.int8),
        "m": random.integers(-60, 60, (16, 16)).astype(np.int8),
        "m1": random.integers(-60, 60, (1, 16, 16)).astype(np.int8),
        "bi": random.integers(-3000, 3000, 16).astype(np.int32),
        "r16": np.array([16]), "same": np.array([16, 16, 3, 3]), "rows": np.array([4, 16]), "first": np.array([0]),
        "low": np.zeros(4, np.int64), "high": np.array([1, 16, 6, 6]),
    }  # fmt: skip
    model = parse(inputs, "y", QX + text + END, **(BIASES | constants | changed))
    found = ids(model) & {"ORT001", "ORT018", "ORT023", "ORT031"}
    assert found == ({finding} if finding else set())
    fused = kernels_of(model, tmp_path)
    is_float = bool({"Conv", "Gemm", "MatMul", "FusedConv", "FusedGemm"}.intersection(fused))
    assert is_float == (finding not in ("", "ORT001"))


ALONE = "v = DequantizeLinear(m, ws, z) "
CHANNELS = "v = DequantizeLinear<axis = 0>(m, wc, zc) "
# name: (nodes, whether the weight is dequantized in every run)
WEIGHTS_ALONE: dict[str, tuple[str, bool]] = {
    "MatMul": (ALONE + "y = MatMul(x, v)", False),
    "channels along the first axis": (CHANNELS + "y = MatMul(x, v)", True),
    "behind Transpose": (ALONE + "t = Transpose(v) y = MatMul(x, t)", False),
    "Gemm": (ALONE + "y = Gemm(x, v, b)", False),
    "transposed Gemm": (ALONE + "y = Gemm<transB = 1>(x, v)", True),
    "two readers": (ALONE + "t = MatMul(x, v) y = MatMul(t, v)", True),
    "on the left": (ALONE + "t = Transpose(x) y = MatMul(v, t)", True),
    "three dimensions": ("v = DequantizeLinear(m1, ws, z) y = MatMul(x, v)", True),
}  # fmt: skip


@pytest.mark.skipif(not LEAVES_MISFITS, reason="before 1.32 only weights in blocks are read as integers")
@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_a_weight_alone_is_slow_where_no_kernel_reads_its_integers(name: str, tmp_path: Path) -> None:
    text, is_slow = WEIGHTS_ALONE[name]
    constants = {"ws": np.array(0.01, F32), "wc": np.full(16, 0.01, F32), "z": np.array(0, np.int8)}
    more = {"zc": np.zeros(16, np.int8), "m1": np.ones((1, 16, 16), np.int8)}
    model = parse(ROWS, "y", text, **constants, **more)
    assert ("ORT023" in ids(model)) == is_slow
    assert ("DequantizeLinear" in kernels_of(model, tmp_path)) == is_slow


def dynamic(largest: int = 60, *, scales: str = "scale_a scale_b", read: str = "yb") -> Model:
    """Two products of one tensor whose range is found when it runs."""
    random = np.random.default_rng(0)
    constants = {}
    text = "[quantize] qx, qs, qz = DynamicQuantizeLinear(x) "
    for name, scale in zip("ab", scales.split(), strict=True):
        weights = random.integers(-largest, largest + 1, (8, 4)).astype(np.int8)
        weights[0, 0] = largest
        constants |= {f"w{name}": weights, scale: random.random(4).astype(F32)}
        text += f"[{name}] i{name} = MatMulInteger(qx, w{name}, qz)  f{name} = Cast<to = 1>(i{name}) "
        text += f"s{name} = Mul(qs, {scale})  y{name} = Mul(f{name}, s{name}) "
    return parse("float[2,8] x", "y", f"{text} y = Sub(ya, {read})", 17, **constants)


@pytest.mark.parametrize(
    ("model", "findings"),
    [
        (dynamic(), set()),
        (dynamic(scales="shared shared"), {"ORT015"}),
        (dynamic(read="fa"), {"ORT015"}),
        (dynamic(127), {"ORT013"}),
    ],
    ids=["separate scales", "a shared scale", "a reader of the cast", "8 bits"],
)
def test_a_dynamic_product_that_is_not_fused_is_slow(model, findings, tmp_path) -> None:
    assert ids(model) & {"ORT013", "ORT015"} == findings
    assert ("MatMulInteger" in kernels_of(model, tmp_path)) == ("ORT015" in findings)


def test_a_dynamic_convolution_is_not_fused(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(models / "digits_resnet.onnx", path, weight_type=QuantType.QUInt8)
    model = load_model(path)
    assert [f.node for f in lint_model(model, "onnxruntime-cpu") if f.id == "ORT016"] == [
        node.name for node in model.nodes if node.op_type == "ConvInteger"
    ]
    assert {"ConvInteger", "Cast", "Mul", "Add", "Relu"} <= {*kernels_of(model, tmp_path)}
    assert "ORT016" not in ids(Model(strip_qdq(model).proto))


def test_every_rule_has_a_model() -> None:
    elsewhere = {f"ORT0{n}" for n in (13, 15, 16, 26, 30)}  # rules on several layers
    tried = {"ORT014"} | REFUSED.keys() | MISFITS.keys() | {name[:6] for name in SLOW} | elsewhere
    assert {rule.id for rule in rules_for() if rule.targets == TARGETS} == tried
