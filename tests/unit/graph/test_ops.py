"""The table of operators: its parts agree, and operators that changed with the opset are respected."""

from __future__ import annotations

import onnx.defs
import pytest
from onnx import helper

from qdqspec.graph import ops
from qdqspec.graph.model import Model, Node

KNOWN = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
TABLES = {name: set(getattr(ops, name)) for name in (
    "COPY_OPS", "MOVING_OPS", "ANCHORS", "POOLS", "SHAPE_SOURCES", "COMMUTATIVE", "DATA_INPUTS", "WEIGHT_INPUT",
    "NEVER",
)}  # fmt: skip


def node_of(op_type: str, *inputs: str, domain: str = "", **attributes: object) -> Node:
    proto = helper.make_node(op_type, inputs or ("x",), ["y"], domain=domain, **attributes)
    graph = helper.make_graph([proto], "g", [], [])
    return Model(helper.make_model(graph)).nodes[0]


@pytest.mark.parametrize("name", TABLES)
def test_every_name_in_the_table_is_an_onnx_operator(name: str) -> None:
    assert TABLES[name] - KNOWN == set()


def test_the_tables_do_not_contradict_each_other() -> None:
    assert TABLES["COPY_OPS"] < TABLES["MOVING_OPS"]
    assert TABLES["COPY_OPS"] <= TABLES["DATA_INPUTS"]
    for one, other in (("MOVING_OPS", "ANCHORS"), ("MOVING_OPS", "POOLS"), ("ANCHORS", "POOLS")):
        assert TABLES[one].isdisjoint(TABLES[other])
    assert TABLES["WEIGHT_INPUT"] <= TABLES["ANCHORS"]
    assert TABLES["COMMUTATIVE"].isdisjoint(TABLES["DATA_INPUTS"])


@pytest.mark.parametrize("op_type", sorted(ops.COPY_OPS - {"Dropout"}))
def test_copies_have_one_data_input_whose_type_they_keep(op_type: str) -> None:
    schema = onnx.defs.get_schema(op_type)
    assert {output.type_str for output in schema.outputs} == {schema.inputs[0].type_str}


def test_data_inputs_exclude_parameters_and_missing_inputs() -> None:
    assert ops.data_inputs(node_of("Resize", "x", "", "scales")) == (0,)
    assert ops.data_inputs(node_of("Conv", "x", "w", "b")) == (0, 1)
    assert ops.data_inputs(node_of("Where", "c", "x", "y")) == (1, 2)
    assert ops.data_inputs(node_of("Add", "x", "")) == (0,)


def test_before_opset_7_an_add_that_broadcasts_is_not_commutative() -> None:
    old = node_of("Add", "x", "b", broadcast=1, axis=1)
    assert not ops.is_commutative(old, 6)
    assert ops.is_commutative(node_of("Add", "x", "y"), 6)
    assert ops.is_commutative(node_of("Add", "x", "y"), 17)
    assert not ops.is_commutative(node_of("Sub", "x", "y"), 17)


def test_operators_of_other_domains_are_not_in_the_table() -> None:
    assert not ops.is_commutative(node_of("Add", "x", "y", domain="odd"), 17)
    assert not ops.copies_values(node_of("Transpose", domain="odd"))
    assert ops.copies_values(node_of("Transpose", domain="ai.onnx"))


@pytest.mark.parametrize(
    ("mode", "nearest"), [({}, True), ({"mode": "nearest"}, True), ({"mode": "linear"}, False)]
)
def test_resize_copies_values_in_nearest_mode_only(mode: dict[str, str], nearest: bool) -> None:
    assert ops.is_nearest(node_of("Resize", **mode)) is nearest
    assert ops.is_nearest(node_of("Upsample", **mode)) is nearest
