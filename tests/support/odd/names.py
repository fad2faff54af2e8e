"""Odd models by their names of nodes and tensors."""

from __future__ import annotations

from functools import partial

import onnx
from onnx_text import parsed

from odd.written import DENSE, OddModel, name_nodes, rename_tensors

_TWO_LAYERS = """net (float[1, 8] x) => (float[1, 8] y) {
    h = MatMul(x, w)
    r = Relu(h)
    y = MatMul(r, v)
}"""
_KINDS = {  # names for two results and a weight
    "colons": ("a:0", "a;1", "b::c:0"),
    "slashes": ("/layer1/0/conv/Conv_output_0", "/a//b/", "./../h"),
    "globs": ("model[0].h", "w*", "?r{1,2}!"),
    "spaces": (" h ", "r\tr", "a b"),
    "quotes": ("h\nh", "r\"r'", "a\\nb<script>&amp;"),
    "unicode": ("größe", "卷积/权重", "\u202e\U0001f600"),
    "endings": ("x_quantized", "x_dequantized", "x_scale"),
    "length": ("h" * 3000, "r" * 3000, "w" * 3000),
}


def _two_layers() -> onnx.ModelProto:
    return parsed(_TWO_LAYERS, **DENSE).proto


def _with_names(kind: str) -> onnx.ModelProto:
    h, r, w = _KINDS[kind]
    named = name_nodes(_two_layers(), f"{h}/n", f"{r}/n", f"{w}/n")
    return rename_tensors(named, {"h": h, "r": r, "w": w})


NAMES = (
    *(
        OddModel(name=f"names-{kind}", oddity=f"names: {kind}", make=partial(_with_names, kind))
        for kind in _KINDS
    ),
    OddModel(
        name="names-of-inputs",
        oddity="inputs and outputs with colons and spaces",
        make=lambda: rename_tensors(_two_layers(), {"x": "in put:0", "y": "out/put;0"}),
    ),
    OddModel(name="names-missing", oddity="nodes without a name", make=_two_layers),
    OddModel(
        name="names-repeated",
        oddity="all nodes have one name, which ONNX allows",
        make=lambda: name_nodes(_two_layers(), "same", "same", "same"),
    ),
    OddModel(
        name="names-of-others",
        oddity="a node is called as another one would be that has no name",
        make=lambda: name_nodes(_two_layers(), "", "MatMul#0", "MatMul#2"),
    ),
)
