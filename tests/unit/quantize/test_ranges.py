from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from qdqspec.graph.model import Model
from qdqspec.qdq.quantize.ranges import TensorRange, tie_ranges


def model_of(*nodes: tuple[str, str, str], **attributes: object) -> Model:
    protos = [
        helper.make_node(op, inputs.split(), outputs.split(), **attributes) for op, inputs, outputs in nodes
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph(protos, "g", [value], [helper.make_tensor_value_info("y", 1, None)])
    return Model(helper.make_model(graph))


COPIES = (
    ("Transpose", "x", "t"), ("Reshape", "t shape", "r"), ("Concat", "r b", "c"), ("MaxPool", "c", "y"),
)  # fmt: skip
JOIN = (("Transpose", "x", "a"), ("MaxPool", "x", "b"), ("Concat", "a b", "y"))


@pytest.mark.parametrize(
    ("nodes", "tied", "apart"),
    [
        (COPIES, "x y b", ""),
        (JOIN, "a b x", ""),
        ((("Split", "x sizes", "y z"),), "x y z", "sizes"),
        ((("MaxPool", "x", "y indices"),), "x y", "indices"),
        ((("Relu", "x", "y"),), "", "x y"),
        ((("Add", "x", "y"),), "", "x y"),
        ((("AveragePool", "x", "y"),), "", "x y"),
    ],
)
def test_tensors_with_the_same_values_have_the_union_of_their_ranges(
    nodes: tuple[tuple[str, str, str], ...], tied: str, apart: str
) -> None:
    names = (*tied.split(), *apart.split())
    ranges = {name: TensorRange(-index, 10.0**index) for index, name in enumerate(names)}
    union = TensorRange(1 - len(tied.split()), 10.0 ** (len(tied.split()) - 1)) if tied else None
    expected = {name: union or ranges[name] for name in tied.split()}
    assert tie_ranges(model_of(*nodes), ranges) == expected | {name: ranges[name] for name in apart.split()}


@pytest.mark.parametrize(("mode", "tied"), [("nearest", True), ("linear", False)])
def test_only_nearest_resize_copies_values(mode: str, tied: bool) -> None:
    ranges = {"x": TensorRange(-8, 8), "y": TensorRange(0, 1)}
    found = tie_ranges(model_of(("Resize", "x", "y"), mode=mode), ranges)
    assert (found["y"] == found["x"]) is tied
