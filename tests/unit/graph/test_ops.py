"""The table of operators: its names exist, and operators that changed with the opset are respected."""

from __future__ import annotations

import onnx.defs
import pytest
from onnx import helper

from qdqspec.graph import ops
from qdqspec.graph.model import Model, Node

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
