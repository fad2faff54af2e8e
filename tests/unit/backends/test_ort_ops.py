"""Verifies the operator table against the installed ONNX Runtime: one small model per entry, whose optimized graph is
read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from operator_models import IMAGE, MATRIX, ONE, RANDOM, Graph, conv, indices, layers_of

from qdqspec.backends.onnxruntime import ops as ort_ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import QDQ_OPS

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
def test_an_operator_of_the_table_runs_in_integers_between_pairs(tmp_path: Path, op: str) -> None:
    assert integer(build_one(op, out=True), tmp_path)


@pytest.mark.parametrize("op", sorted(ort_ops.LINEAR + ort_ops.COMPUTING))
def test_label_in_only_is_offered_exactly_where_it_fuses(tmp_path: Path, op: str) -> None:
    assert integer(build_one(op, out=False), tmp_path) == ("in-only" in ort_ops.LABELS[op])


@pytest.mark.parametrize("op", sorted(ort_ops.MOVING))
def test_operators_that_copy_values_need_equal_scales(tmp_path: Path, op: str) -> None:
    assert not integer(build_one(op, out=True, scale=0.05), tmp_path)


NOT_OFFERED: dict[str, Callable[[Graph, str], str]] = {
    **{
        op: (lambda g, x, op=op: g.node(op, x))
        for op in ("Tanh", "Gelu", "HardSigmoid", "Elu", "Erf", "Exp", "Sqrt", "GlobalMaxPool", "Softplus")
    },
    "Sub": lambda g, x: g.node("Sub", x, g.input(IMAGE)),
    "Div": lambda g, x: g.node("Div", x, g.input(IMAGE)),
    "Pad": lambda g, x: g.node("Pad", x, indices(g, 0, 0, 1, 1, 0, 0, 1, 1)),
    "LayerNormalization": lambda g, x: g.node("LayerNormalization", x, g.const(np.ones(6, np.float32))),
    "ReduceMean": lambda g, x: g.node("ReduceMean", x, indices(g, 2, 3)),
    "Resize linear": lambda g, x: g.node("Resize", x, "", g.const([1, 1, 2, 2], np.float32), mode="linear"),
    "ConvTranspose": lambda g, x: g.node("ConvTranspose", x, g.weight(8, 8, 3, 3, axis=1)),
    "BatchNormalization": lambda g, x: g.node(
        "BatchNormalization", conv(g, x), *[g.const(np.ones(8, np.float32))] * 4
    ),
}


@pytest.mark.parametrize("op", NOT_OFFERED)
def test_operators_not_offered_run_in_float(tmp_path: Path, op: str) -> None:
    assert op not in ort_ops.LABELS
    g = Graph()
    assert not integer(g.model(g.pair(NOT_OFFERED[op](g, g.input(IMAGE))), opset=20), tmp_path)


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


@pytest.mark.parametrize("bias", ["float", "int32"])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("axis", [0, None])
def test_convolutions_fuse_with_any_bias_group_and_granularity(
    tmp_path: Path, bias: str, group: int, axis: int | None
) -> None:
    g = Graph()
    rest = g.const(RANDOM.uniform(-1, 1, 8), np.float32) if bias == "float" else g.bias(8)
    assert integer(g.model(g.pair(conv(g, g.input(IMAGE), rest, group=group, axis=axis))), tmp_path)


def with_float_weight(op: str, g: Graph, x: str) -> str:
    shape = (8, 8, 3, 3) if op == "Conv" else (32, 16)
    weight = g.const(RANDOM.uniform(-1, 1, shape), np.float32)
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


@pytest.mark.parametrize("op", ["MaxPool", "Transpose"])
def test_pairs_are_moved_past_operators_before_a_float_weight_too(tmp_path: Path, op: str) -> None:
    g = Graph()
    x = g.node("Transpose", ONE[op](g, g.input((1, 8, 8, 8))), perm=[0, 1, 3, 2])
    assert integer(g.model(g.pair(with_float_weight("Conv", g, x))), tmp_path)


@pytest.mark.parametrize(("out", "fuses"), [(True, True), (False, False)])
@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_a_linear_operator_with_float_output_needs_an_integer_bias(
    tmp_path: Path, op: str, out: bool, fuses: bool
) -> None:
    for kind, expected in (("float", fuses), ("int32", True)):
        g = Graph()
        rest = g.const(RANDOM.uniform(-1, 1, 16), np.float32) if kind == "float" else g.bias(16)
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
