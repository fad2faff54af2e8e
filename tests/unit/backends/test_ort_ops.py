"""Verifies operators, formats and the placement rule against the installed ONNX Runtime, whose kernels are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import linear, model_of
from operator_models import IMAGE, MATRIX, ONE, Graph, layers_of
from written_cases import normal

from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.onnxruntime import engine, ops as ort_ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.onnxruntime.ops import BLOCKED_4, BLOCKED_8, BLOCKED_AXES
from qdqspec.graph.model import Model
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import Inserter, insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

SHAPES = dict.fromkeys(ort_ops.LINEAR, MATRIX)


def integer(model: onnx.ModelProto, folder: Path) -> bool:
    """Whether all kernels of a model except conversions compute on integers."""
    layers = layers_of(OnnxRuntime(), model, folder)
    return all(layer.integer for layer in layers if not layer.boundary)


def build_one(op: str, *, out: bool, scale: float = 0.02) -> onnx.ModelProto:
    g = Graph()
    outputs = [ONE[op](g, g.input(SHAPES.get(op, IMAGE))), *g.others]
    return g.model(*(g.pair(y, scale=scale) if out else y for y in outputs))


@pytest.mark.parametrize("op", sorted(ort_ops.LABELS))
def test_an_operator_of_the_table_runs_in_integers_under_exactly_its_labels(tmp_path: Path, op: str) -> None:
    """Operators that copy values need equal scales before and after."""
    assert integer(build_one(op, out=True), tmp_path)
    if op in ort_ops.MOVING:
        assert not integer(build_one(op, out=True, scale=0.05), tmp_path)
    else:
        assert integer(build_one(op, out=False), tmp_path) == ("in-only" in ort_ops.LABELS[op])


RELU: Callable[[Graph, str], str] = lambda g, y: g.node("Relu", y)  # noqa: E731 - a row of a table


def clip(low: float, high: float) -> Callable[[Graph, str], str]:
    return lambda g, y: g.node("Clip", y, g.const(low, np.float32), g.const(high, np.float32))


@pytest.mark.parametrize(
    ("after", "zero", "scale", "absorbed"),
    [
        pytest.param(RELU, 0, 0.02, True, id="relu"),
        pytest.param(RELU, 128, 0.02, False, id="relu-symmetric"),
        pytest.param(clip(0, 6), 0, 6 / 255, True, id="clip-full-range"),
        pytest.param(clip(0, 6), 0, 5 / 255, True, id="clip-range-inside"),
        pytest.param(clip(0, 6), 0, 7 / 255, False, id="clip-range-outside"),
        pytest.param(clip(-1, 1), 128, 1 / 255, True, id="clip-both-signs"),
        pytest.param(lambda g, y: g.node("Identity", y), 128, 0.02, True, id="identity"),
        pytest.param(lambda g, y: g.node("Dropout", y), 128, 0.02, True, id="dropout"),
        pytest.param(lambda g, y: g.node("LeakyRelu", y, alpha=0.1), 128, 0.02, False, id="leaky-relu"),
        pytest.param(lambda g, y: g.node("Sigmoid", y), 0, 1 / 256, False, id="sigmoid"),
    ],
)
@pytest.mark.parametrize("producer", ["Conv", "Add"])
def test_activation_functions_that_the_following_q_absorbs_are_removed(
    tmp_path: Path, producer: str, after: Callable[[Graph, str], str], zero: int, scale: float, absorbed: bool
) -> None:
    g = Graph()
    y = after(g, ONE[producer](g, g.input(IMAGE)))
    assert (g.nodes[-1].op_type in ort_ops.ABSORBED) or not absorbed
    assert integer(g.model(g.pair(y, zero=zero, scale=scale)), tmp_path) == absorbed


def with_float_weight(op: str, g: Graph, x: str) -> str:
    shape = (8, 8, 3, 3) if op == "Conv" else (32, 16)
    weight = g.const(g.random.uniform(-1, 1, shape), np.float32)
    return g.node(op, x, weight, **({"pads": [1, 1, 1, 1]} if op == "Conv" else {}))


@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
def test_float_weights_between_pairs_are_quantized_for_exactly_the_operators_of_the_table(
    tmp_path: Path, op: str
) -> None:
    found = []
    for is_read_in_float in (False, True):
        g = Graph()
        y = with_float_weight(op, g, g.input(SHAPES.get(op, IMAGE)))
        others = [g.node("Sin", y)] if is_read_in_float else []
        found.append(integer(g.model(g.pair(y), *others), tmp_path))
    assert found == [op in ort_ops.COMPLETED, False]


@pytest.mark.parametrize("op", sorted(ort_ops.MOVING))
def test_pairs_are_moved_past_exactly_the_operators_of_the_table(tmp_path: Path, op: str) -> None:
    g = Graph()
    y = ONE[op](g, with_float_weight("Conv", g, g.input(IMAGE)))
    assert integer(g.model(g.pair(y)), tmp_path) == (op in ort_ops.MOVED_PAST)


@pytest.mark.parametrize(("out", "fuses"), [(True, True), (False, False)])
@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_a_linear_operator_with_float_output_needs_an_integer_bias(
    tmp_path: Path, op: str, out: bool, fuses: bool
) -> None:
    for kind, expected in (("float", fuses), ("int32", True)):
        g = Graph()
        rest = g.const(g.random.uniform(-1, 1, 16), np.float32) if kind == "float" else g.bias(16)
        x, weight = g.input(MATRIX), g.weight(32, 16, axis=1)
        y = g.node(op, x, weight, *([rest] if op == "Gemm" else []))
        y = y if op == "Gemm" else g.node("Add", y, rest)
        assert integer(g.model(g.pair(y) if out else y), tmp_path) == expected


@pytest.mark.parametrize("follower", ["Relu", "Clip", "Tanh"])
@pytest.mark.parametrize("op", ["Gemm", "MatMul", "MatMul+Add"])
def test_a_linear_operator_outputs_no_floats_to_an_activation_function_that_a_q_could_absorb(
    tmp_path: Path, op: str, follower: str
) -> None:
    g = Graph()
    x, weight = g.input(MATRIX), g.weight(32, 16, axis=1)
    y = g.node("Gemm", x, weight) if op == "Gemm" else g.node("MatMul", x, weight)
    y = g.node("Add", y, g.bias(16)) if op == "MatMul+Add" else y
    model = g.model(g.node("Tanh", g.node(follower, y)))
    others = (follower, "Tanh", *QDQ_OPS)
    (product,) = [layer for layer in layers_of(OnnxRuntime(), model, tmp_path) if layer.op_type not in others]
    assert product.integer == (follower not in ort_ops.ABSORBED)


# ---- formats other than 8-bit integers ---------------------------------------------------------------


WEIGHT = normal(256, 64)
X = normal(2, 256, seed=1)


def weight_only(model: Model, fmt: str) -> onnx.ModelProto:
    site = Site(tensor="w", consumers=(Consumer("linear", 1),), format=fmt, axis=0, weight=True)
    return insert_qdq(model, Placement(sites=frozenset({site})), Quantizer(model, {})).proto


def built(proto: onnx.ModelProto, folder: Path) -> Engine:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return OnnxRuntime().build(path, BuildOptions())


@pytest.mark.parametrize("fmt", [*BLOCKED_4, *BLOCKED_8])
@pytest.mark.parametrize("op_type", BLOCKED_AXES)
def test_blocks_along_the_first_axis_become_one_kernel(tmp_path: Path, op_type: str, fmt: str) -> None:
    """It is nearly exact: it quantizes rows of its input to 8 bits."""
    proto = weight_only(linear(op_type, X, WEIGHT, bias=op_type == "Gemm"), fmt)
    opened = built(proto, tmp_path)
    (exact,) = ReferenceEvaluator(proto).run(None, {"x": X})
    np.testing.assert_allclose(opened.run({"x": X})["y"], exact, atol=0.02 * np.abs(exact).max())
    opened.bind({"x": X})
    assert {layer.op_type for layer in opened.layers(runs=1)} == {"MatMulNBits"}


@pytest.mark.parametrize("fmt", BLOCKED_8)
def test_eight_bits_in_blocks_do_not_saturate(tmp_path: Path, fmt: str) -> None:
    """All weights and inputs are at the end of their range: sums of two products exceed 16 bits."""
    model = linear("MatMul", X, np.where(WEIGHT > 0, 1, 0.99))
    proto, x = weight_only(model, fmt), np.ones_like(X)
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

    assert labels(linear("MatMul", X, WEIGHT)) == labels(linear("Gemm", X, WEIGHT)) == [("fp", "in-only")]
    assert labels(linear("Gemm", X, WEIGHT, transposed=True)) == []
    assert labels(linear("MatMul", X[:, :96], WEIGHT[:96])) == []  # not a whole number of blocks


# ---- the rule `copies-read-in-bodies` ------------------------------------------------------------


COPIES = {
    "MaxPool": "MaxPool <kernel_shape: ints = [1, 1]> (r)",
    "Transpose": "Transpose <perm: ints = [0, 1, 3, 2]> (r)",
    "Reshape": "Reshape (r, shape)",
    "two copies": "Transpose <perm: ints = [0, 1, 3, 2]> (s)",
}
READERS = {  # an If whose condition is constant would be inlined
    "Loop": """
        y = Loop (n, "", x) <body: graph = b (int64 i, bool k, float[1,4,6,6] v) => (bool k2, float[1,4,6,6] w)
            { k2 = Identity(k)  w = Add(v, p) }>""",
    "If": """
        y = If (c) <then_branch: graph = t () => (float[1,4,6,6] a) { a = Relu(p) },
            else_branch: graph = e () => (float[1,4,6,6] o) { o = Neg(p) }>""",
    "neither": "y = Add(p, x)",
}


def drawn(copy: str, reader: str) -> Model:
    """A convolution, a copy of its result, and a reader of the copy in a body or in the main graph."""
    second = "s = Reshape (r, shape)" if "(s)" in COPIES[copy] else ""
    text = f"""(float[1,4,6,6] x, bool c) => (float[1,4,6,6] y)
        <int64[4] shape = {{1, 4, 6, 6}}, int64 n = {{1}}> {{
            h = Conv (x, W)  r = Relu (h)  {second}  p = {COPIES[copy]}  {READERS[reader]} }}"""
    return Model(onnx.shape_inference.infer_shapes(model_of(text, W=(4, 4, 1, 1)).proto))


@pytest.fixture(scope="module")
def backend() -> Iterator[Isolated]:
    with Isolated("onnxruntime") as opened:
        yield opened


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("copy", COPIES)
def test_every_label_builds(backend: Isolated, tmp_path: Path, copy: str, reader: str) -> None:
    model = drawn(copy, reader)
    space = SchemeSpace(model, backend.capabilities())
    labels = space.everything()
    assert labels or reader != "neither"  # a convolution has only labels with a quantized result
    ranges = {name: TensorRange(-3.0, 3.0) for name in ("x", "h", "r", "s", "p", "y")}
    for chosen in (labels, *({unit.id: label} for unit in space.units for label in unit.labels)):
        made = Inserter(model, Quantizer(model, ranges)).insert(space.resolve(chosen))
        save_model(made.proto, tmp_path / "q.onnx")
        engine = backend.build(tmp_path / "q.onnx", BuildOptions())
        engine.run({"x": np.ones((1, 4, 6, 6), np.float32), "c": np.array(True)})
        engine.close()


@pytest.mark.parametrize(("reader", "units"), [("If", set()), ("neither", {"h"})])
def test_the_rule_applies_to_bodies_only(reader: str, units: set[str]) -> None:
    capabilities = FakeDevice().capabilities()
    model = drawn("Reshape", reader)
    without, with_rule = (
        {unit.id for unit in SchemeSpace(model, replace(capabilities, rules=rules)).units}
        for rules in ({}, OnnxRuntime().capabilities().rules)
    )
    assert "h" in without
    assert with_rule & {"h"} == units
