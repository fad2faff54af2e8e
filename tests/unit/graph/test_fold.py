"""BatchNormalization is folded into the convolution before it, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of, parsed
from random_models import onnx_models, random_inputs

from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import Model, Node

SHAPE = (2, 4, 7, 7)


def conv_norm(op: str = "Conv", *, group: int = 1, bias: bool = True) -> onnx.ModelProto:
    """``x`` through a convolution to ``c`` and a BatchNormalization to ``y``."""
    random = np.random.default_rng(0)
    values = {
        "w": random.normal(size=(8, 4 // group, 3, 3) if op == "Conv" else (4, 8 // group, 3, 3)),
        **({"b": random.normal(size=8)} if bias else {}),
        "gamma": random.uniform(0.5, 2, 8),
        "beta": random.normal(size=8),
        "mean": random.normal(size=8),
        "variance": random.uniform(0.1, 3, 8),
    }
    text = f"""g (float[2,4,7,7] x) => (float[2,8,7,7] y) {{
        [conv] c = {op}<group = {group}, pads = [1, 1, 1, 1]>(x, w{", b" if bias else ""})
        [norm] y = BatchNormalization<epsilon = 0.001>(c, gamma, beta, mean, variance) }}"""
    return parsed(text, **{name: value.astype(np.float32) for name, value in values.items()}).proto


FEED = {"x": np.random.default_rng(9).normal(size=SHAPE).astype(np.float32)}


def assert_same_outputs(
    model: Model, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray] = FEED, within: float = 1e-4
) -> None:
    for ours, theirs in zip(outputs_of(model, feeds), outputs_of(proto, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=within, atol=within)


def ops(model: Model) -> list[str]:
    return [node.op_type for node in model.nodes if not node.is_marker]


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_the_same_after_folding(op: str, group: int, bias: bool) -> None:
    proto = conv_norm(op, group=group, bias=bias)
    before = proto.SerializeToString()
    folded = fold_batchnorm(Model(proto))
    assert folded.removed == ("norm",)
    assert ops(folded.model) == [op]
    assert {t.name for t in folded.model.proto.graph.initializer}.isdisjoint({"w", "b", "gamma", "mean"})
    onnx.checker.check_model(folded.model.proto, full_check=True)
    assert_same_outputs(folded.model, proto)
    assert proto.SerializeToString() == before


def test_shared_statistics_and_weights_are_folded_for_each() -> None:
    proto = conv_norm()
    norm = ["gamma", "beta", "mean", "variance"]
    proto.graph.node.extend(
        [
            helper.make_node("Conv", ["x", "w"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c2", *norm], ["y2"], "norm2", epsilon=0.1),
        ]
    )
    proto.graph.output.extend([helper.make_tensor_value_info("y2", TensorProto.FLOAT, (2, 8, 7, 7))])
    folded = fold_batchnorm(Model(proto))
    assert folded.removed == ("norm", "norm2")
    assert_same_outputs(folded.model, proto)


def test_parameters_in_constant_nodes_are_removed_unless_another_node_reads_them() -> None:
    proto = conv_norm()
    values = {t.name: t for t in proto.graph.initializer}
    del proto.graph.initializer[:]
    for name, value in reversed(values.items()):
        proto.graph.node.insert(0, helper.make_node("Constant", [], [name], value=value))
    proto.graph.node.append(helper.make_node("Identity", ["gamma"], ["kept"]))
    proto.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.FLOAT, [8]))
    folded = fold_batchnorm(Model(proto))
    assert ops(folded.model) == ["Constant", "Conv", "Identity"]
    assert folded.model.nodes[0].outputs == ("gamma",)
    assert_same_outputs(folded.model, proto)


def test_new_names_differ_from_existing_ones() -> None:
    """The model has tensors named ``y/weight`` and ``y/bias``."""
    proto = conv_norm()
    for name in ("y/weight", "y/bias"):
        proto.graph.initializer.extend([numpy_helper.from_array(np.full(8, 5, np.float32), name)])
    proto.graph.node.extend([helper.make_node("Add", ["y/weight", "y/bias"], ["z"], "add")])
    proto.graph.output.extend([helper.make_tensor_value_info("z", TensorProto.FLOAT, (8,))])
    folded = fold_batchnorm(Model(proto)).model
    onnx.checker.check_model(folded.proto, full_check=True)
    assert_same_outputs(folded, proto)


def training(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].attribute.append(helper.make_attribute("training_mode", 1))
    proto.graph.node[1].output.extend(["m2", "v2"])


def seen_outside(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, (2, 8, 7, 7)))


def read_twice(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(helper.make_node("Relu", ["c"], ["r"], "relu"))
    proto.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, (2, 8, 7, 7)))


def computed_weight(proto: onnx.ModelProto) -> None:
    proto.graph.node.insert(0, helper.make_node("Neg", ["w"], ["nw"], "neg"))
    proto.graph.node[1].input[1] = "nw"


def computed_statistics(proto: onnx.ModelProto) -> None:
    proto.graph.node.insert(0, helper.make_node("Neg", ["beta"], ["nb"], "neg"))
    proto.graph.node[2].input[2] = "nb"


def not_a_convolution(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].CopyFrom(helper.make_node("Concat", ["x", "x"], ["c"], "concat", axis=1))


def another_domain(proto: onnx.ModelProto, node: int = 1) -> None:
    proto.graph.node[node].domain = "com.example"
    proto.opset_import.append(helper.make_opsetid("com.example", 1))


def per_activation(proto: onnx.ModelProto) -> None:
    """Opset 7 has statistics of one value per activation."""
    proto.opset_import[0].version = 7
    proto.graph.node[1].attribute.append(helper.make_attribute("spatial", 0))
    for tensor in proto.graph.initializer:
        if tensor.name in ("gamma", "beta", "mean", "variance"):
            tensor.CopyFrom(numpy_helper.from_array(np.ones((8, 7, 7), np.float32), tensor.name))


@pytest.mark.parametrize(
    "change",
    [
        training,
        seen_outside,
        read_twice,
        computed_weight,
        computed_statistics,
        not_a_convolution,
        another_domain,
        lambda proto: another_domain(proto, node=0),
        per_activation,
    ],
)
def test_unsuitable_batch_normalizations_are_not_folded(change) -> None:
    proto = conv_norm()
    change(proto)
    model = Model(proto)
    folded = fold_batchnorm(model)
    assert folded.removed == ()
    assert folded.model is model


def test_generated_node_names_are_the_same_after_folding() -> None:
    """Profiles of the original model, rules of a spec, and placements in the folded model use the same node names."""
    proto = conv_norm()
    for node in proto.graph.node:
        node.name = ""
    for name, before, after in (("", "y", "z"), ("twice", "z", "z2"), ("twice", "z2", "z3")):
        proto.graph.node.append(helper.make_node("Relu", [before], [after], name))
    model = Model(proto)
    names = ["Conv#0", "BatchNormalization#1", "Relu#2", "twice", "Relu#4"]
    assert [node.name for node in model.nodes] == names
    assert [node.name for node in fold_batchnorm(model).model.nodes] == [names[0], *names[2:]]
    assert proto.graph.node[2].name == "", "the model of the user is not changed"


def unnamed(node: Node) -> onnx.NodeProto:
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    proto.name = ""
    return proto


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
    assert [unnamed(n) for n in folded.model.nodes if n.op_type != "Conv"] == [unnamed(n) for n in kept]
    assert [n.name for n in folded.model.nodes] == [n.name for n in left if n.name not in folded.removed]
    has_steps = any(node.op_type == "Cast" for node in model.nodes)  # rounding may change their result by one
    if added and not has_steps:
        assert_same_outputs(folded.model, proto, random_inputs(model), within=1e-3)
