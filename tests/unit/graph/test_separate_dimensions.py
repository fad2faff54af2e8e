"""Dimensions that are all called ``?`` are not equal."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from qdqspec.graph.given import given_model

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[B,3,H,W] x) => (float[B,3,H,W] y) { y = Relu(x) }"""


def saved(folder: Path, first: str, second: str) -> Path:
    proto = onnx.parser.parse_model(TEXT)
    for port in (*proto.graph.input, *proto.graph.output):
        for dim, name in zip(port.type.tensor_type.shape.dim[2:], (first, second), strict=True):
            dim.dim_param = name
    onnx.save(proto, folder / "net.onnx")
    return folder / "net.onnx"


def names(model: onnx.ModelProto) -> list[list[str]]:
    ports = (*model.graph.input, *model.graph.output)
    return [[dim.dim_param for dim in port.type.tensor_type.shape.dim] for port in ports]


def test_the_question_mark_is_no_name(tmp_path: Path) -> None:
    model = given_model(saved(tmp_path, "?", "?"), {})
    assert names(model.proto) == [["B", "", "", ""]] * 2
    assert any("'?'" in note for note in model.notes)


@pytest.mark.parametrize(("first", "second"), [("H", "W"), ("H", "H"), ("?", "W")])
def test_other_names_stay(tmp_path: Path, first: str, second: str) -> None:
    path = saved(tmp_path, first, second)
    assert given_model(path, {}).path == path
