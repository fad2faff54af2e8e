"""Unique names for nodes and tensors in all graphs of a model."""

from __future__ import annotations

import onnx

from qdqspec.graph.flat import Scopes, find_scopes


def scopes_of(text: str) -> Scopes:
    return find_scopes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'))


TWO_BRANCHES = """g (bool yes, float[4] x) => (float[4] y) {
    h = Relu(x)
    [choice] y = If(yes) <
        then_branch = then () => (float[4] a) { [act] a = Relu(h) },
        else_branch = other () => (float[4] a) { t = Abs(h) [act] a = Neg(t) }
    >
}"""


def test_nodes_of_bodies_are_named_by_their_path() -> None:
    found = scopes_of(TWO_BRANCHES)
    assert [scope.path for scope in found.all] == ["", "choice/then_branch", "choice/else_branch"]
    assert found.all[2].names == ("choice/else_branch/Abs#0", "choice/else_branch/act")
    scope, index = found.of_node["choice/then_branch/act"]
    assert scope.graph.node[index].op_type == "Relu"


def test_a_path_that_is_a_prefix_of_a_node_name_is_changed() -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {TWO_BRANCHES}')
    proto.graph.node[0].name = "choice/then_branch/act"
    found = find_scopes(proto)
    assert [scope.path for scope in found.bodies] == ["choice/then_branch~1", "choice/else_branch"]
