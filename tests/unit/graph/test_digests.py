"""Digests of nodes: what a message names if a model changed, without the old model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.node_digests import changes_text
from qdqspec.graph.digests import digests_of
from qdqspec.graph.model import Model


def weight(name: str, seed: int) -> TensorProto:
    return numpy_helper.from_array(
        np.random.default_rng(seed).normal(size=(4, 4, 1, 1)).astype(np.float32), name
    )


def network(*, named: bool = True) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="layer1/conv1"),
        helper.make_node("Relu", ["a"], ["b"], name="layer1/relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="layer1/conv2", kernel_shape=[1, 1]),
        helper.make_node("Add", ["c", "b"], ["d"], name="add"),
        helper.make_node("Mul", ["d", "s"], ["e"], name="mul"),
        helper.make_node("Add", ["e", "s"], ["y"], name="shift"),
    ]
    for node in nodes if not named else ():
        node.name = ""
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4, 8, 8])] for name in "xy"]
    constants = [weight("w1", 1), weight("w2", 2), numpy_helper.from_array(np.float32(0.5), "s")]
    graph = helper.make_graph(nodes, "g", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def insert_relu(proto: onnx.ModelProto, name: str = "layer1/relu2") -> None:
    proto.graph.node.insert(3, helper.make_node("Relu", ["c"], ["c2"], name=name))
    proto.graph.node[4].input[0] = "c2"


def remove_add(proto: onnx.ModelProto) -> None:
    del proto.graph.node[3]
    proto.graph.node[3].input[0] = "c"


def set_weight(proto: onnx.ModelProto, index: int = 1) -> None:
    name = proto.graph.initializer[index].name
    proto.graph.initializer[index].CopyFrom(weight(name, 9))


def set_scalar(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.float32(0.25), "s"))


def set_attribute(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("strides", [2, 2]))


def rewire(proto: onnx.ModelProto) -> None:
    proto.graph.node[3].input[1] = "a"


def rename(proto: onnx.ModelProto) -> None:
    proto.graph.node[2].name = "stage1/conv2"


def rename_tensor(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = "first"
    proto.producer_name = "another"


def resize(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8


def raise_opset(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 18


def rewrite(proto: onnx.ModelProto) -> None:
    for change in (set_weight, set_attribute, insert_relu):
        change(proto)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_weight, "1 node changed: Conv 'layer1/conv2' (weights); 1 constant changed"),
        (set_attribute, "1 node changed: Conv 'layer1/conv1' (attributes)"),
        (insert_relu, "1 node changed: + Relu 'layer1/relu2'"),
        (remove_add, "1 node changed: - Add 'add'"),
        (rewire, "1 node changed: Add 'add' (inputs)"),
        (set_scalar, "2 nodes changed: Mul 'mul' (weights), Add 'shift' (weights); 1 constant changed"),
        (rename, "1 node renamed"),
        (rename_tensor, "nodes and constants are the same: other names of tensors, or other metadata"),
        (resize, "1 node changed: input 'x' (type)"),
        (raise_opset, "1 node changed: operator set 'ai.onnx' (version)"),
        (
            rewrite,
            (
                "3 nodes changed: Conv 'layer1/conv1' (attributes), Conv 'layer1/conv2' (weights), "
                "+ Relu 'layer1/relu2'; 1 constant changed"
            ),
        ),
    ],
)
def test_the_text_names_what_changed(change: Callable[[onnx.ModelProto], None], text: str) -> None:
    before, after = network(), network()
    change(after)
    assert changes_text(digests_of(Model(before)), digests_of(Model(after))) == text


def test_nodes_without_names_are_matched_by_order() -> None:
    before, after = network(named=False), network(named=False)
    insert_relu(after, "")
    text = changes_text(digests_of(Model(before)), digests_of(Model(after)))
    assert text == "1 node changed: + Relu 'Relu#3'"


def test_a_constant_is_the_same_in_each_form() -> None:
    """As raw bytes, as a list of numbers, and as a Constant node."""
    before, after = network(), network()
    raw = after.graph.initializer[0]
    values = numpy_helper.to_array(raw)
    raw.CopyFrom(TensorProto(name="w1", dims=values.shape, data_type=1, float_data=values.ravel()))
    moved = after.graph.initializer.pop()
    after.graph.node.insert(0, helper.make_node("Constant", [], [moved.name], value=moved))
    assert digests_of(Model(before)) == digests_of(Model(after))


def chain(count: int) -> Model:
    nodes = [
        helper.make_node(
            "Add" if i % 3 else "Relu",
            [f"t{i}", f"c{i}"] if i % 3 else [f"t{i}"],
            [f"t{i + 1}"],
            name=f"/layers/{i}/attention/operator_{i}",
        )
        for i in range(count)
    ]
    constants = [numpy_helper.from_array(np.float32(i), f"c{i}") for i in range(count) if i % 3]
    ends = [[helper.make_tensor_value_info(f"t{i}", TensorProto.FLOAT, [1])] for i in (0, count)]
    graph = helper.make_graph(nodes, "g", *ends, constants)
    return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def test_the_digests_of_many_nodes_are_short() -> None:
    assert len(digests_of(chain(20_000))) < 256 << 10


def test_a_few_of_many_changes_are_named() -> None:
    text = changes_text(digests_of(chain(20)), digests_of(chain(40)))
    assert text.startswith("20 nodes changed: ")
    assert text.endswith(", and 15 more; 1 node renamed")
    assert text.count("operator_") == 5


@pytest.mark.parametrize("damaged", ["", "abc", "\u00e9", "{}", digests_of(chain(30))[:50]])
def test_missing_or_damaged_digests_give_no_text(damaged: str) -> None:
    assert changes_text(damaged, digests_of(chain(3))) == ""
    assert changes_text(digests_of(chain(3)), damaged) == ""
