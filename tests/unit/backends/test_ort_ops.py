"""Verifies the operator table against the installed ONNX Runtime: one small model per entry, whose optimized graph is
read."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from operator_models import IMAGE, MATRIX, ONE, RANDOM, Graph, conv, indices
from packaging.version import Version

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime import ops as ort_ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.graph.model import QDQ_OPS
from qdqspec.types import LayerTime

SHAPES = dict.fromkeys(ort_ops.LINEAR, MATRIX)


@pytest.fixture
def layers_of(tmp_path: Path) -> Callable[[onnx.ModelProto], tuple[LayerTime, ...]]:
    """The kernels that a model runs, found by running it."""

    def run(model: onnx.ModelProto) -> tuple[LayerTime, ...]:
        path = tmp_path / "one.onnx"
        onnx.save(model, path)
        engine = OnnxRuntime().build(path, BuildOptions())
        engine.bind(
            {
                i.name: RANDOM.uniform(
                    -1, 1, [d.dim_value or 4 for d in i.type.tensor_type.shape.dim]
                ).astype(np.float32)
                for i in model.graph.input
            }
        )
        layers = engine.layers(1)
        engine.close()
        assert layers, "the profile did not fit the graph"
        return layers

    return run


@pytest.fixture
def integer(
    layers_of: Callable[[onnx.ModelProto], tuple[LayerTime, ...]],
) -> Callable[[onnx.ModelProto], bool]:
    """Whether all kernels of a model except conversions compute on integers; the model is also run once."""
    return lambda model: all(layer.integer for layer in layers_of(model) if not layer.boundary)


def build_one(op: str, *, out: bool, scale: float = 0.02) -> onnx.ModelProto:
    g = Graph()
    outputs = [ONE[op](g, g.input(SHAPES.get(op, IMAGE))), *g.others]
    return g.model(*(g.pair(y, scale=scale) if out else y for y in outputs))


def test_every_entry_of_the_table_has_a_model() -> None:
    assert set(ONE) == set(ort_ops.LABELS)


@pytest.mark.parametrize("op", sorted(ort_ops.LABELS))
def test_an_operator_of_the_table_runs_in_integers_between_pairs(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    assert integer(build_one(op, out=True))


@pytest.mark.parametrize("op", sorted(ort_ops.LINEAR + ort_ops.COMPUTING))
def test_label_in_only_is_offered_exactly_where_it_fuses(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    assert integer(build_one(op, out=False)) == ("in-only" in ort_ops.LABELS[op])


@pytest.mark.parametrize("op", sorted(ort_ops.MOVING))
def test_operators_that_copy_values_need_equal_scales(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    assert not integer(build_one(op, out=True, scale=0.05))


@pytest.mark.parametrize(
    "op",
    ["Sub", "Div", "Tanh", "Gelu", "HardSigmoid", "Elu", "Erf", "Exp", "Sqrt", "GlobalMaxPool", "Softplus"],
)
def test_operators_not_offered_run_in_float(integer: Callable[[onnx.ModelProto], bool], op: str) -> None:
    assert op not in ort_ops.LABELS
    g = Graph()
    x = g.input(IMAGE)
    y = g.node(op, x, g.input(IMAGE)) if op in ("Sub", "Div") else g.node(op, x)
    assert not integer(g.model(g.pair(y), opset=20))


@pytest.mark.parametrize("op", ["Pad", "LayerNormalization", "ReduceMean", "Resize linear", "ConvTranspose"])
def test_operators_not_offered_that_have_parameters_run_in_float(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    makers: dict[str, Callable[[Graph, str], str]] = {
        "Pad": lambda g, x: g.node("Pad", x, indices(g, 0, 0, 1, 1, 0, 0, 1, 1)),
        "LayerNormalization": lambda g, x: g.node(
            "LayerNormalization", x, g.const(np.ones(6, np.float32)), g.const(np.ones(6, np.float32))
        ),
        "ReduceMean": lambda g, x: g.node("ReduceMean", x, axes=[2, 3]),
        "Resize linear": lambda g, x: g.node(
            "Resize", x, "", g.const([1, 1, 2, 2], np.float32), mode="linear"
        ),
        "ConvTranspose": lambda g, x: g.node("ConvTranspose", x, g.weight(8, 8, 3, 3, axis=1)),
    }
    g = Graph()
    assert not integer(g.model(g.pair(makers[op](g, g.input(IMAGE)))))


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
    integer: Callable[[onnx.ModelProto], bool],
    producer: str,
    after: Callable[[Graph, str], str],
    zero: int,
    scale: float,
    absorbed: bool,
) -> None:
    g = Graph()
    y = after(g, ONE[producer](g, g.input(IMAGE)))
    assert (g.nodes[-1].op_type in ort_ops.ABSORBED) or not absorbed
    assert integer(g.model(g.pair(y, zero=zero, scale=scale))) == absorbed


@pytest.mark.parametrize("bias", ["float", "int32"])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("axis", [0, None])
def test_convolutions_fuse_with_any_bias_group_and_granularity(
    integer: Callable[[onnx.ModelProto], bool], bias: str, group: int, axis: int | None
) -> None:
    g = Graph()
    rest = g.const(RANDOM.uniform(-1, 1, 8), np.float32) if bias == "float" else g.bias(8)
    assert integer(g.model(g.pair(conv(g, g.input(IMAGE), rest, group=group, axis=axis))))


def with_float_weight(op: str, g: Graph, x: str) -> str:
    shape = (8, 8, 3, 3) if op == "Conv" else (32, 16)
    weight = g.const(RANDOM.uniform(-1, 1, shape), np.float32)
    return g.node(op, x, weight, **({"pads": [1, 1, 1, 1]} if op == "Conv" else {}))


@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
def test_float_weights_between_pairs_are_quantized_for_exactly_the_operators_of_the_table(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    found = []
    for is_read_in_float in (False, True):
        g = Graph()
        y = with_float_weight(op, g, g.input(SHAPES.get(op, IMAGE)))
        others = [g.node("Sin", y)] if is_read_in_float else []
        found.append(integer(g.model(g.pair(y), *others)))
    assert found == [op in ort_ops.COMPLETED, False]


@pytest.mark.parametrize("op", sorted(ort_ops.MOVING))
def test_pairs_are_moved_past_exactly_the_operators_of_the_table(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    g = Graph()
    y = ONE[op](g, with_float_weight("Conv", g, g.input(IMAGE)))
    assert integer(g.model(g.pair(y))) == (op in ort_ops.MOVED_PAST)


@pytest.mark.parametrize("op", ["MaxPool", "Transpose"])
def test_pairs_are_moved_past_operators_before_a_float_weight_too(
    integer: Callable[[onnx.ModelProto], bool], op: str
) -> None:
    g = Graph()
    x = g.node("Transpose", ONE[op](g, g.input((1, 8, 8, 8))), perm=[0, 1, 3, 2])
    assert integer(g.model(g.pair(with_float_weight("Conv", g, x))))


@pytest.mark.parametrize(("bias", "out", "fuses"), [("float", True, True), ("float", False, False)])
@pytest.mark.parametrize("op", ["Gemm", "MatMul+Add"])
def test_a_linear_operator_with_float_output_needs_an_integer_bias(
    integer: Callable[[onnx.ModelProto], bool], op: str, bias: str, out: bool, fuses: bool
) -> None:
    for kind, expected in ((bias, fuses), ("int32", True)):
        g = Graph()
        rest = g.const(RANDOM.uniform(-1, 1, 16), np.float32) if kind == "float" else g.bias(16)
        x, weight = g.input(MATRIX), g.weight(32, 16, axis=1)
        y = (
            g.node("Gemm", x, weight, rest)
            if op == "Gemm"
            else g.node("Add", g.node("MatMul", x, weight), rest)
        )
        assert integer(g.model(g.pair(y) if out else y)) == expected


@pytest.mark.parametrize("follower", ["Relu", "Clip", "Tanh"])
@pytest.mark.parametrize("op", ["Gemm", "MatMul", "MatMul+Add"])
def test_a_linear_operator_outputs_no_floats_to_an_activation_function_that_a_q_could_absorb(
    layers_of: Callable[[onnx.ModelProto], tuple[LayerTime, ...]], op: str, follower: str
) -> None:
    g = Graph()
    x, weight = g.input(MATRIX), g.weight(32, 16, axis=1)
    y = g.node("Gemm", x, weight) if op == "Gemm" else g.node("MatMul", x, weight)
    y = g.node("Add", y, g.bias(16)) if op == "MatMul+Add" else y
    model = g.model(g.node("Tanh", g.node(follower, y)))
    others = (follower, "Tanh", *QDQ_OPS)
    (product,) = [layer for layer in layers_of(model) if layer.op_type not in others]
    assert product.integer == (follower not in ort_ops.ABSORBED)


def test_a_batch_normalization_before_the_q_prevents_the_fusion(
    integer: Callable[[onnx.ModelProto], bool],
) -> None:
    g = Graph()
    statistics = [g.const(np.ones(8, np.float32)) for _ in range(4)]
    y = g.node("BatchNormalization", conv(g, g.input(IMAGE)), *statistics)
    assert not integer(g.model(g.pair(y)))


@pytest.mark.parametrize("shape", [(32, 16), (2, 32, 16)])
def test_matmul_weights_per_channel_must_be_flat_and_last(
    integer: Callable[[onnx.ModelProto], bool], shape: tuple[int, ...]
) -> None:
    """Before 1.32 it builds and fails when run, from then on it runs in float, so that no placement may contain it."""
    axis = 0 if len(shape) == 2 else 2
    g = Graph()
    x = g.input((*shape[:-2], 4, 32))
    model = g.model(g.pair(g.node("MatMul", x, g.weight(*shape, axis=axis))))
    if Version(version("onnxruntime")) < Version("1.32"):
        with pytest.raises(BackendError, match="could not be run"):
            integer(model)
    else:
        assert not integer(model)


@pytest.mark.parametrize(("opset", "fuses"), [(11, False), (12, True)])
def test_max_pool_has_integer_inputs_from_opset_12(
    integer: Callable[[onnx.ModelProto], bool], opset: int, fuses: bool
) -> None:
    g = Graph()
    model = g.model(g.pair(ONE["MaxPool"](g, g.input(IMAGE))), opset=opset)
    assert integer(model) == fuses
