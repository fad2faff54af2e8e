"""Digests of nodes: what a message names if a model changed, without the old model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_text import parsed

from qdqspec._core.node_digests import changes_text
from qdqspec.graph.given import digests_of
from qdqspec.graph.model import Model

NETWORK = """g (float[n,4,8,8] x) => (float[n,4,8,8] y) {
    a = Conv(x, w1)  b = Relu(a)  c = Conv<kernel_shape = [1, 1]>(b, w2)
    d = Add(c, b)  e = Mul(d, s)  y = Add(e, s) }"""
NAMES = ("layer1/conv1", "layer1/relu", "layer1/conv2", "add", "mul", "shift")


def weight(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, 4, 1, 1)).astype(np.float32)


def network() -> onnx.ModelProto:
    proto = parsed(NETWORK, w1=weight(1), w2=weight(2), s=np.float32(0.5)).proto
    for node, name in zip(proto.graph.node, NAMES, strict=True):
        node.name = name
    return proto


def change(proto: onnx.ModelProto, what: str) -> None:
    graph = proto.graph
    conv, relu, second, add = graph.node[:4]
    if what in ("+relu", "all"):
        add.input[0] = "c2"
        graph.node.insert(
            3, helper.make_node("Relu", ["c"], ["c2"], name=second.name.replace("conv2", "relu2"))
        )
    if what == "-add":
        graph.node[4].input[0] = "c"
        graph.node.remove(add)
    if what in ("weight", "all"):
        graph.initializer[1].CopyFrom(numpy_helper.from_array(weight(9), "w2"))
    if what == "scalar":
        graph.initializer[2].CopyFrom(numpy_helper.from_array(np.float32(0.25), "s"))
    if what in ("attribute", "all"):
        conv.attribute.append(helper.make_attribute("strides", [2, 2]))
    if what == "wire":
        add.input[1] = "a"
    if what == "node name":
        second.name = "stage1/conv2"
    if what == "tensor name":
        conv.output[0] = relu.input[0] = "first"
        proto.producer_name = "another"
    if what == "size":
        graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    if what == "opset":
        proto.opset_import[0].version = 18


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("weight", "1 node changed: Conv 'layer1/conv2' (weights); 1 constant changed"),
        ("attribute", "1 node changed: Conv 'layer1/conv1' (attributes)"),
        ("+relu", "1 node changed: + Relu 'layer1/relu2'"),
        ("-add", "1 node changed: - Add 'add'"),
        ("wire", "1 node changed: Add 'add' (inputs)"),
        ("scalar", "2 nodes changed: Mul 'mul' (weights), Add 'shift' (weights); 1 constant changed"),
        ("node name", "2 nodes changed: + Conv 'stage1/conv2', - Conv 'layer1/conv2'"),
        ("tensor name", "nodes and constants are the same: other names of tensors, or other metadata"),
        ("size", "1 node changed: input 'x' (type)"),
        ("opset", "1 node changed: operator set 'ai.onnx' (version)"),
        (
            "all",
            (
                "3 nodes changed: Conv 'layer1/conv1' (attributes), Conv 'layer1/conv2' (weights), "
                "+ Relu 'layer1/relu2'; 1 constant changed"
            ),
        ),
    ],
)
def test_the_text_names_what_changed(what: str, text: str) -> None:
    before, after = network(), network()
    change(after, what)
    assert changes_text(digests_of(Model(before)), digests_of(Model(after))) == text


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
    nodes = (f"t{i + 1} = {f'Add(t{i}, c)' if i % 3 else f'Relu(t{i})'}" for i in range(count))
    model = parsed(f"g (float[1] t0) => (float[1] t{count}) {{ {' '.join(nodes)} }}", c=np.float32(1))
    for index, node in enumerate(model.proto.graph.node):
        node.name = f"/layers/{index}/attention/operator_{index}"
    return Model(model.proto)


def test_the_digests_of_many_nodes_are_short() -> None:
    assert len(digests_of(chain(20_000))) < 256 << 10


def test_a_few_of_many_changes_are_named() -> None:
    text = changes_text(digests_of(chain(20)), digests_of(chain(40)))
    assert text.startswith("22 nodes changed: ")
    assert text.endswith(", and 17 more")
    assert text.count("operator_") == 5


@pytest.mark.parametrize("damaged", ["", "abc", "\u00e9", "{}", digests_of(chain(30))[:50]])
def test_missing_or_damaged_digests_give_no_text(damaged: str) -> None:
    assert changes_text(damaged, digests_of(chain(3))) == ""
    assert changes_text(digests_of(chain(3)), damaged) == ""
