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


def test_a_tie_continues_through_copies_without_a_range() -> None:
    model = model_of(
        ("Transpose", "x", "t"), ("Reshape", "t shape", "r"), ("Concat", "r b", "c"), ("MaxPool", "c", "y")
    )
    found = tie_ranges(model, {"x": TensorRange(0, 1), "y": TensorRange(0, 9), "b": TensorRange(-3, 0)})
    assert found == dict.fromkeys(("x", "y", "b"), TensorRange(-3, 9))


def test_every_output_of_a_split_is_tied_and_the_sizes_are_not() -> None:
    ranges = {
        "x": TensorRange(0, 8),
        "sizes": TensorRange(0, 2),
        "y": TensorRange(0, 1),
        "z": TensorRange(0, 3),
    }
    found = tie_ranges(model_of(("Split", "x sizes", "y z")), ranges)
    assert found == {**dict.fromkeys(("x", "y", "z"), TensorRange(0, 8)), "sizes": TensorRange(0, 2)}


@pytest.mark.parametrize("op", ["Relu", "Add", "AveragePool", "Conv"])
def test_ops_that_compute_tie_nothing(op: str) -> None:
    ranges = {"x": TensorRange(-8, 8), "y": TensorRange(0, 1)}
    assert tie_ranges(model_of((op, "x", "y")), ranges) == ranges


@pytest.mark.parametrize(("mode", "tied"), [("nearest", True), ("linear", False), ("cubic", False)])
def test_only_nearest_resize_copies_values(mode: str, tied: bool) -> None:
    ranges = {"x": TensorRange(-8, 8), "y": TensorRange(0, 1)}
    found = tie_ranges(model_of(("Resize", "x", "y"), mode=mode), ranges)
    assert (found["y"] == found["x"]) is tied


def test_the_indices_of_a_pool_are_not_tied() -> None:
    ranges = {"x": TensorRange(0, 1), "y": TensorRange(0, 1), "indices": TensorRange(0, 900)}
    assert tie_ranges(model_of(("MaxPool", "x", "y indices")), ranges) == ranges


def test_branches_that_join_have_one_range() -> None:
    """Two branches that join share all their scales, whichever of their tensors were calibrated."""
    model = model_of(("Transpose", "x", "a"), ("MaxPool", "x", "b"), ("Concat", "a b", "y"))
    found = tie_ranges(model, {"a": TensorRange(0, 1), "b": TensorRange(-2, 0), "x": TensorRange(0, 3)})
    assert set(found.values()) == {TensorRange(-2, 3)}
