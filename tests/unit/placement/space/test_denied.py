"""Nodes excluded by `patterns.deny` read only float tensors."""

from __future__ import annotations

import onnx

from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model
from qdqspec.qdq.space.search_space import SchemeSpace


def test_denied_nodes_read_floating_point_and_their_neighbours_stay_quantizable() -> None:
    model = Model(
        onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["" : 17]>
            net (float[1,4] x) => (float[1,4] p, float[1,4] y)
            <float[4,4] w = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}> {
                a = Gemm(x, w)
                p = Softmax(a)
                b = Gemm(a, w)
                c = Gemm(b, w)
                d = Softmax(c)
                y = Softmax(d)
            }"""
        )
    )
    capabilities = Capabilities(
        formats=("int8",),
        labels={"Gemm": ("in+out", "in-only"), "Softmax": ("in+out",)},
        activations={"int8": "uint8"},
        weights={"int8": "int8"},
    )
    softmax = {node.name for node in model.nodes if node.op_type == "Softmax"}
    gemms = {node.name for node in model.nodes} - softmax
    space = SchemeSpace(model, capabilities, allowed=gemms, denied=softmax)
    placement = space.resolve(space.everything())
    readers = {end.node for site in placement.sites for end in site.consumers}
    assert not readers & softmax
    assert space.by_id["Gemm#0"].labels == ("fp", "in+out", "in-only")  # Gemm#2 reads it too
    assert space.by_id["Gemm#3"].labels == ("fp", "in-only")  # only a Softmax does
