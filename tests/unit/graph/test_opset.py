"""Raising the opset changes operators and nothing else, and the table of operators respects it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from qdqspec.errors import ModelError
from qdqspec.graph import ops
from qdqspec.graph.conversion import raise_opset
from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import opset_of


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_a_model_with_a_raised_opset_is_valid_and_otherwise_equal(models: Path, name: str) -> None:
    proto = onnx.load(models / f"{name}.onnx")
    before = proto.SerializeToString()
    raised = raise_opset(proto, 21)
    onnx.checker.check_model(raised, full_check=True)
    assert opset_of(raised) == 21
    assert raised.graph.initializer == proto.graph.initializer
    assert raised.graph.value_info == proto.graph.value_info
    assert [(n.name, n.output) for n in raised.graph.node] == [(n.name, n.output) for n in proto.graph.node]
    assert proto.SerializeToString() == before


def test_metadata_and_other_domains_are_kept() -> None:
    proto = parsed("g (float[4] x) => (float[4] y) { h = my.Odd(x)  y = Relu(h) }", 13).proto
    proto.metadata_props.add(key="author", value="me")
    proto.graph.node[0].metadata_props.add(key="scope", value="block")
    raised = raise_opset(proto, 21)
    assert {o.domain: o.version for o in raised.opset_import} == {"": 21, "my": 1}
    assert raised.metadata_props == proto.metadata_props
    assert raised.graph.node[0] == proto.graph.node[0]


def test_weights_that_no_caller_could_replace_remain_constant() -> None:
    """From IR version 4 on an initializer that is an input is a default value, which runtimes do not fold."""
    proto = parsed("g (float[4] x, float[4] w) => (float[4] y) { y = Add(x, w) }", 7, ir=3, w=(4,)).proto
    for opset in (7, 13):
        assert [port.name for port in raise_opset(proto, opset).graph.input] == ["x"]
    assert len(proto.graph.input) == 2


def test_a_failure_states_both_versions_and_the_reason() -> None:
    proto = parsed("g (float[1] x) => (float[1] y) { y = NoSuchOperator(x) }", 7).proto
    with pytest.raises(ModelError, match=r"from 7 to 13: (.*NoSuchOperator|onnx converts no)"):
        raise_opset(proto, 13)


BRANCHES = """g (float[1,4,8,8] x, bool c) => (float[1,4] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[1,4] p) {
            [conv] q = Conv(x, w) r = Relu(q) s = ReduceSum<axes = [2,3]>(r) p = Squeeze<axes = [2,3]>(s)
        },
        else_branch = e () => (float[1,4] p) {
            s = ReduceSum<axes = [2,3], keepdims = 0>(x) p = Softmax<axis = 1>(s)
        }
    >
}"""


def test_bodies_with_a_raised_opset_are_otherwise_equal() -> None:
    proto = parsed(BRANCHES, 11).proto
    (branch, _) = (a.g for a in proto.graph.node[0].attribute)
    random = np.random.default_rng(0)
    branch.initializer.append(
        numpy_helper.from_array(random.normal(size=(4, 4, 1, 1)).astype(np.float32), "w")
    )
    branch.value_info.add().CopyFrom(onnx.helper.make_tensor_value_info("q", 1, [1, 4, 8, 8]))
    branch.initializer[0].doc_string = "trained"
    branch.node[0].metadata_props.add(key="scope", value="block")
    raised = raise_opset(proto, 13)
    onnx.checker.check_model(raised, full_check=True)
    (after, _) = (a.g for a in raised.graph.node[0].attribute)
    assert [len(n.input) for n in after.node if n.op_type in ("ReduceSum", "Squeeze")] == [2, 2]
    assert after.initializer[0] == branch.initializer[0]
    assert after.value_info == branch.value_info
    assert after.node[0] == branch.node[0]
    feeds = {"x": random.normal(size=(1, 4, 8, 8)).astype(np.float32)}
    for choice in (True, False):
        one, other = (
            ReferenceEvaluator(m).run(None, {**feeds, "c": np.array(choice)}) for m in (proto, raised)
        )
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)


KNOWN = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
TABLES = ("MOVING_OPS", "ANCHORS", "POOLS", "SHAPE_SOURCES", "COMMUTATIVE", "DATA_INPUTS", "NEVER")


def node_of(op_type: str, *inputs: str, **attributes: object) -> Node:
    graph = helper.make_graph([helper.make_node(op_type, inputs, ["y"], **attributes)], "g", [], [])
    return Model(helper.make_model(graph)).nodes[0]


@pytest.mark.parametrize("name", TABLES)
def test_every_name_in_the_table_is_an_onnx_operator(name: str) -> None:
    assert set(getattr(ops, name)) - KNOWN == set()


def test_before_opset_7_an_add_that_broadcasts_is_not_commutative() -> None:
    assert not ops.is_commutative(node_of("Add", "x", "b", broadcast=1, axis=1), 6)
    assert ops.is_commutative(node_of("Add", "x", "y"), 6)
    assert ops.is_commutative(node_of("Add", "x", "y"), 17)
    assert not ops.is_commutative(node_of("Sub", "x", "y"), 17)
