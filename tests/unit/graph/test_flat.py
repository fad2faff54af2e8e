"""The flat form of a model with bodies, and the conversion back."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given
from onnx import numpy_helper
from onnx_text import parsed
from random_models import onnx_models

from qdqspec.graph.flat import closed, is_flat, opened
from qdqspec.graph.model import Model

TWO = """g (bool yes, float[4] x) => (float[4] y)
    <float[4] w = {1, 2, 3, 4}> {
    h = Relu(x)
    [choice] y = If(yes) <
        then_branch = then () => (float[4] a) <float[4] k = {1, 1, 1, 1}> { b = Add(h, k) [act] a = Mul(b, w) },
        else_branch = other () => (float[4] a) <float[4] k = {2, 2, 2, 2}> { [act] a = Add(h, k) }
    >
}"""


def bytes_of(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


@given(onnx_models(repeated_names=True))
def test_any_model_is_equal_byte_for_byte_after_conversion_back(proto: onnx.ModelProto) -> None:
    flat = opened(proto)
    assert is_flat(flat)
    assert bytes_of(closed(flat)) == bytes_of(proto)
    assert Model(flat).proto == proto


def test_nodes_are_in_one_graph_under_unique_names() -> None:
    model = parsed(TWO)
    operators = [node for node in model.nodes if not node.is_marker]
    assert [node.name for node in operators] == [
        "Relu#0",
        "choice/then_branch/Add#0",
        "choice/then_branch/act",
        "choice/else_branch/act",
        "choice",
    ]
    assert [node.scope for node in operators] == ["", *["choice/then_branch"] * 2, "choice/else_branch", ""]
    assert operators[2].outputs == ("choice/then_branch/a",)
    assert operators[-1].inputs == ("yes",)
    assert model.captured == {"h"}
    np.testing.assert_array_equal(model.array("choice/else_branch/k"), [2, 2, 2, 2])
    assert model.shape("b") == (4,)
    assert {end.name for end in model.bodies["choice"]} == {"choice/then_branch", "choice/else_branch"}


def test_a_new_constant_is_stored_in_the_graph_that_reads_it() -> None:
    flat = opened(parsed(TWO).proto)
    by_name = {node.name: node for node in flat.graph.node}
    for name, value in (("in_then", 5), ("in_both", 6)):
        flat.graph.initializer.append(numpy_helper.from_array(np.full(4, value, np.float32), name))
    by_name["choice/then_branch/Add#0"].input[1] = "in_then"
    by_name["choice/then_branch/act"].input[1] = "in_both"
    by_name["choice/else_branch/act"].input[1] = "in_both"
    proto = closed(flat)
    onnx.checker.check_model(proto, full_check=True)
    then, other = (attribute.g for attribute in proto.graph.node[1].attribute)
    assert [t.name for t in proto.graph.initializer] == ["w", "in_both"]
    assert [t.name for t in then.initializer] == ["k", "in_then"]
    assert [t.name for t in other.initializer] == ["k"]


def test_a_path_that_is_a_prefix_of_a_node_name_is_changed() -> None:
    proto = parsed(TWO).proto
    proto.graph.node[0].name = "choice/then_branch/act"
    scopes = {node.scope for node in Model(proto).nodes}
    assert scopes == {"", "choice/then_branch~1", "choice/else_branch"}
