"""Constants and BatchNormalization are folded, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import helper, numpy_helper
from onnx_text import outputs_of, parsed
from random_models import onnx_models, random_inputs

from qdqspec.graph.fold import Folded, fold_batchnorm, fold_constants, fold_weights
from qdqspec.graph.model import Model

CONV = "[conv] c = Conv<pads = [1, 1, 1, 1]>(x, w, b) "
STATISTICS = "gamma, beta, mean, variance"
NORM = f"[norm] y = BatchNormalization<epsilon = 0.001>(c, {STATISTICS}) "


def conv_norm(
    text: str = CONV + NORM, more: str = "", *, op: str = "Conv", group: int = 1, opset: int = 17
) -> Model:
    """``x`` through a convolution to ``c`` and a BatchNormalization to ``y``; ``more`` outputs."""
    random = np.random.default_rng(0)
    values = {
        "w": random.normal(size=(8, 4 // group, 3, 3) if op == "Conv" else (4, 8 // group, 3, 3)),
        "b": random.normal(size=8),
        "gamma": random.uniform(0.5, 2, 8),
        "beta": random.normal(size=8),
        "mean": random.normal(size=8),
        "variance": random.uniform(0.1, 3, 8),
    }
    text = f"g (float[2,4,7,7] x) => (float[2,8,7,7] y{more}) {{ {text} }}"
    return parsed(text, opset, **{name: value.astype(np.float32) for name, value in values.items()})


FEED = {"x": np.random.default_rng(9).normal(size=(2, 4, 7, 7)).astype(np.float32)}


def assert_same_outputs(
    model: Model, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray] = FEED, within: float = 1e-4
) -> None:
    for ours, theirs in zip(outputs_of(model, feeds), outputs_of(proto, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=within, atol=within)


def ops(folded: Folded) -> list[str]:
    return [node.op_type for node in folded.model.nodes if not node.is_marker]


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("bias", [", b", ""])
@pytest.mark.parametrize("mean", ["mean", "same"])
def test_outputs_are_the_same_after_folding(op: str, group: int, bias: str, mean: str) -> None:
    """PyTorch's exporter stores equal parameters once, and gives them to all but one reader by an Identity."""
    conv = f"same = Identity(mean)  c = {op}<group = {group}, pads = [1, 1, 1, 1]>(x, w{bias}) "
    model = conv_norm(conv + NORM.replace("mean", mean), op=op, group=group)
    before = model.proto.SerializeToString()
    folded = fold_weights(model)
    assert folded.removed == ("norm",)
    assert ops(folded)[-1] == op
    assert set(folded.model.initializers).isdisjoint({"w", "gamma"})
    onnx.checker.check_model(folded.model.proto, full_check=True)
    assert_same_outputs(folded.model, model.proto)
    assert model.proto.SerializeToString() == before


def test_shared_statistics_and_weights_are_folded_for_each_under_new_names() -> None:
    """The model has tensors named ``y/weight`` and ``y/bias``."""
    second = f"""c2 = Conv<pads = [1, 1, 1, 1]>(x, w)
        [norm2] y2 = BatchNormalization<epsilon = 0.1>(c2, {STATISTICS})  z = Add(weight, bias)"""
    proto = conv_norm(CONV + NORM + second, ", float[2,8,7,7] y2, float[8] z").proto
    for name in ("y/weight", "y/bias"):
        proto.graph.initializer.append(numpy_helper.from_array(np.full(8, 5, np.float32), name))
    proto.graph.node[-1].input[:] = ["y/weight", "y/bias"]
    folded = fold_batchnorm(Model(proto))
    assert folded.removed == ("norm", "norm2")
    onnx.checker.check_model(folded.model.proto, full_check=True)
    assert_same_outputs(folded.model, proto)


def test_parameters_in_constant_nodes_are_removed_unless_another_node_reads_them() -> None:
    proto = conv_norm(CONV + NORM + "kept = Identity(gamma)", ", float[8] kept").proto
    values = {t.name: t for t in proto.graph.initializer}
    del proto.graph.initializer[:]
    for name, value in reversed(values.items()):
        proto.graph.node.insert(0, helper.make_node("Constant", [], [name], value=value))
    folded = fold_batchnorm(Model(proto))
    assert ops(folded) == ["Constant", "Conv", "Identity"]
    assert folded.model.nodes[0].outputs == ("gamma",)
    assert_same_outputs(folded.model, proto)


@pytest.mark.parametrize(
    ("text", "more", "opset"),
    [
        (CONV + f"y, m, v = BatchNormalization<training_mode = 1>(c, {STATISTICS})", "", 17),
        (CONV + NORM, ", float c", 17),
        (CONV + NORM + "r = Relu(c)", ", float r", 17),
        ("k = Neg(w) c = Conv(x, k)" + NORM, "", 17),
        (CONV + "k = Neg(beta) y = BatchNormalization(c, gamma, k, mean, variance)", "", 17),
        ("c = Concat<axis = 1>(x, x)" + NORM, "", 17),
        ("c = com.example.Conv(x, w, b)" + NORM, "", 17),
        (CONV + f"y = com.example.BatchNormalization(c, {STATISTICS})", "", 17),
        (CONV + f"y = BatchNormalization<spatial = 0>(c, {STATISTICS})", "", 7),  # statistics of activations
    ],
)
def test_unsuitable_batch_normalizations_are_not_folded(text: str, more: str, opset: int) -> None:
    model = conv_norm(text, more, opset=opset)
    folded = fold_batchnorm(model)
    assert folded.removed == ()
    assert folded.model is model


@settings(max_examples=20)
@given(onnx_models(bodies=False), st.integers(0, 100))
def test_folding_inserted_batch_normalizations_restores_the_model(proto: onnx.ModelProto, seed: int) -> None:
    """A BatchNormalization is inserted after each convolution of a random model, and folding removes exactly these."""
    random, added = np.random.default_rng(seed), 0
    types = Model(proto)
    for node in list(proto.graph.node):
        if node.op_type != "Conv":
            continue
        channels = types.shape(node.output[0])[1]
        statistics = []
        for what in ("gamma", "beta", "mean", "variance"):
            statistics.append(f"bn{added}.{what}")
            values = random.uniform(0.5, 2, channels).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(values, statistics[-1]))
        inner, outer = f"bn{added}.in", node.output[0]
        position = list(proto.graph.node).index(node)
        proto.graph.node[position].output[0] = inner
        norm = helper.make_node("BatchNormalization", [inner, *statistics], [outer], f"bn{added}")
        proto.graph.node.insert(position + 1, norm)
        added += 1
    model = Model(proto)
    folded = fold_batchnorm(model)
    assert len(folded.removed) == added
    assert folded.model.outputs == model.outputs
    read = {name for node in folded.model.nodes for name in node.inputs}
    left = [n for n in model.nodes if n.op_type != "Constant" or n.outputs[0] in read]
    kept = [node for node in left if node.op_type not in ("BatchNormalization", "Conv")]
    same = [node for node in folded.model.nodes if node.op_type != "Conv"]
    for one, other in zip(same, kept, strict=True):
        assert (one.inputs, one.outputs, one.attributes) == (other.inputs, other.outputs, other.attributes)
    assert [n.name for n in folded.model.nodes] == [n.name for n in left if n.name not in folded.removed]
    has_steps = any(node.op_type == "Cast" for node in model.nodes)  # rounding may change their result by one
    if added and not has_steps:
        assert_same_outputs(folded.model, proto, random_inputs(model), within=1e-3)


def net(text: str, **constants: object) -> Model:
    return parsed(text, 19, **constants)


S = np.array(0.5, np.float32)
Z = np.array(3, np.int8)
W = np.arange(4, dtype=np.float32)


SHIFTED = helper.make_function(
    "", "Neg", ["i"], ["o"], [helper.make_node("Abs", ["i"], ["o"])], [helper.make_opsetid("", 19)]
)


@pytest.mark.parametrize(
    "text",
    [
        "q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = Add(x, d)",
        "d = DequantizeLinear(i, s, z)  r = Relu(d)  y = Add(x, r)",
        "q, t, u = DynamicQuantizeLinear(w)  d = DequantizeLinear(q, t, u)  y = Add(x, d)",
        "q = trt.TRT_FP8QuantizeLinear(w, s)  d = trt.TRT_FP8DequantizeLinear(q, s)  y = Add(x, d)",
        "d = com.microsoft.DequantizeLinear(i, s, z)  y = Add(x, d)",
        "d = DequantizeLinear(i, s, z)  y = Neg(x)",
        "r = RandomNormal<shape = [4]>()  y = Add(x, r)",
        *(f"r = {op}(w)  y = Add(x, r)" for op in ("RandomNormalLike", "Bernoulli", "Dropout")),
        "r = Reshape(w, three)  y = Add(x, r)",  # which the reference cannot compute
        "a = Neg(w)  y = Add(x, a)",  # a function of the model, not the operator of ONNX
    ],
)
def test_pairs_random_operators_and_functions_are_never_folded(text: str) -> None:
    ints = {"i": np.ones(4, np.int8), "three": np.array([3])}
    model = net(f"g (float[4] x) => (float[4] y) {{ {text} }}", w=W, s=S, z=Z, **ints)
    model.proto.functions.extend([SHIFTED] if "Neg(w)" in text else [])
    folded = fold_constants(model)
    assert [n.proto for n in folded.model.nodes] == [n.proto for n in model.nodes]


def test_an_initializer_that_a_caller_may_replace_is_not_constant() -> None:
    text = "g (float[4] x, float s) => (float[4] y) { a = Add(s, s)  y = Add(x, a) }"
    model = net(text, s=S)
    assert fold_constants(model).model is model
    weight = net(
        "g (float[2,4] x, float[4,4] w) => (float[2,4] y) { t = Transpose(w)  y = MatMul(x, t) }", w=(4, 4)
    )
    assert fold_weights(weight).model is weight
    old = fold_constants(parsed(text, 19, ir=3, s=S))
    assert ops(old) == ["Add"]
    assert [i.name for i in old.model.proto.graph.input] == ["x"]
    onnx.checker.check_model(old.model.proto)


def test_constants_of_bodies_are_folded_in_them() -> None:
    folded = fold_constants(
        net(
            """g (float[4] x, bool c) => (float[4] y) {
                a = Add(s, s)
                y = If (c) <then_branch = t () => (float[4] u) { u = Mul(x, a) },
                            else_branch = e () => (float[4] v) { k = Add(s, s)  v = Mul(x, k) }> }""",
            s=S,
        )
    )
    assert ops(folded) == ["Mul", "Mul", "If"]
    assert set(folded.model.initializers) == {"a", "k"}
    assert [t.name for t in folded.model.proto.graph.initializer] == []  # each is in the body that reads it
    onnx.checker.check_model(folded.model.proto, full_check=True)


def test_a_constant_is_computed_whatever_the_model_declares_for_it() -> None:
    model = net(
        """g (float[2,4] x, bool c) => (float[2,4] y) <float[9] t> {
            t = Transpose(w)
            h = MatMul(x, t)
            y = If (c) <then_branch = b () => (float[2,4] u) { r = Reshape(flat, form)  u = MatMul(h, r) },
                        else_branch = e () => (float[2,4] v) { v = Relu(h) }> }""",
        w=_SQUARE,
        flat=_SQUARE.reshape(-1),
        form=np.array([4, 4]),  # of another graph than the Reshape
    )
    for folded in (fold_constants(model), fold_weights(model)):
        assert ops(folded) == ["MatMul", "MatMul", "Relu", "If"]
        assert not [info.name for info in folded.model.proto.graph.value_info if info.name == "t"]


def test_tensors_above_the_size_limit_are_not_computed() -> None:
    model = net(
        "g (float[4] x) => (float[4] y) { e = ConstantOfShape(n)  r = ReduceSum(e)  y = Add(x, r) }",
        n=np.array([10**12], np.int64),
    )
    folded = fold_constants(model)
    assert folded.model is model
    assert "would be larger than 1048576 bytes: 'ConstantOfShape#0'" in folded.notes[0]
    small = net(
        "g (float[99] x) => (float[99] y) { e = ConstantOfShape(n)  y = Add(x, e) }", n=np.array([99])
    )
    assert ops(fold_constants(small)) == ["Add"]
    assert ops(fold_constants(small, limit_bytes=100)) == ["ConstantOfShape", "Add"]

    # a weight above the limit may be transposed, but not enlarged
    weight = np.ones((600, 512), np.float32)
    turned = net("g (float[1,512] x) => (float[1,600] y) { t = Transpose(w)  y = MatMul(x, t) }", w=weight)
    assert ops(fold_constants(turned)) == ["MatMul"]
    text = "g (float[1] x) => (float[1200,512] y) { t = Tile(w, n)  y = Mul(x, t) }"
    tiled = net(text, w=weight, n=np.array([2, 1]))
    assert fold_constants(tiled).model is tiled


def test_a_size_of_minus_one_is_unknown() -> None:
    model = net(
        "g (float[4,2] x) => (float[n,1] y) { s = Shape(x)  r = Expand(one, s)  y = Add(x, r) }", one=S
    )
    model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert ops(fold_constants(Model(model.proto))) == ["Shape", "Expand", "Add"]


def test_unused_nodes_and_initializers_are_removed() -> None:
    model = net(
        "g (float[4] x) => (float[4] y) { a = Neg(x)  b = Abs(a)  c = trt.Own(x)  y = Relu(x) }", s=S, w=W
    )
    # one that makes nothing
    model.proto.graph.node.add(op_type="Shown", name="show", domain="trt", input=["x"])
    folded = fold_constants(Model(model.proto))
    assert ops(folded) == ["Own", "Relu", "Shown"]
    assert folded.unused == ("Neg#0", "Abs#1")
    assert folded.model.initializers == {}


_FEED = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
_SQUARE = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("t = Transpose(w)  y = MatMul(x, t)", ["MatMul"]),
        ("t = Transpose(w)  a = Gather(w, at)  r = Add(x, a)  y = MatMul(r, t)", ["Gather", "Add", "MatMul"]),
        ("t = Transpose(w)  y = Gemm(x, t, s)", ["Gemm"]),
        ("i = Identity(w)  j = Identity(i)  y = Gemm(x, j)", ["Gemm"]),
        ("h = Cast<to = 10>(w)  f = Cast<to = 1>(h)  y = MatMul(x, f)", ["MatMul"]),
        ("n = ReduceL2<keepdims = 1>(w)  d = Div(w, n)  m = Mul(d, s)  y = MatMul(x, m)", ["MatMul"]),
        ("n = Neg(b)  y = Gemm(x, w, n)", ["Gemm"]),
        ("t = Transpose(w)  a = MatMul(t, x2)  y = MatMul(x, a)", ["MatMul", "MatMul"]),
        # what is no weight stays, and so do weights that depend on an input or that are quantized
        ("n = Neg(b)  a = Add(x, n)  y = MatMul(a, w)", ["Neg", "Add", "MatMul"]),
        ("m = Mul(w, x3)  y = MatMul(x, m)", ["Mul", "MatMul"]),
        (
            "q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = MatMul(x, d)",
            ["QuantizeLinear", "DequantizeLinear", "MatMul"],
        ),
    ],
)
def test_weights_and_biases_computed_from_constants_become_constants(body: str, left: list[str]) -> None:
    text = f"g (float[2,4] x, float[4,4] x2, float[1,4] x3) => (float[2,4] y) {{ {body} }}"
    model = net(text, w=_SQUARE, b=W, s=S, z=Z, at=np.array([1, 2]))
    folded = fold_weights(model)
    assert ops(folded) == left
    feeds = {"x": _FEED, "x2": _SQUARE + 1, "x3": _FEED[:1]}
    assert_same_outputs(folded.model, model.proto, feeds)
