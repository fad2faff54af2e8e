from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from qdqspec.accuracy.data import random_feeds
from qdqspec.graph.model import Model, load_model

VOCABULARY = 37


def embedding_model() -> Model:
    """ids > Cast > Gather(table) > y, with a mask beside it."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "wide"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "weights"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT32, [1, 400]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, [1, 400, 1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(np.ones((VOCABULARY, 4), np.float32), "table")],
    )
    return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


SHAPES = {"ids": (1, 400), "mask": (1, 400, 1)}


def test_random_indices_cover_exactly_the_rows_of_their_table() -> None:
    model = embedding_model()
    session = onnxruntime.InferenceSession(model.proto.SerializeToString())
    feeds = list(random_feeds(model, SHAPES, seed=1, count=5))
    for feed in feeds:
        session.run(None, feed)  # raises where an index is out of range
    ids = np.concatenate([feed["ids"] for feed in feeds])
    assert ids.dtype == np.int32
    assert set(np.unique(ids)) == set(range(VOCABULARY))
    assert set(np.unique(feeds[0]["mask"])) == {0, 1}


def test_random_integers_that_are_dequantized_span_their_type() -> None:
    nodes = [helper.make_node("DequantizeLinear", [name, "s"], [f"{name}_"]) for name in ("a", "b", "c")]
    kinds = {"a": TensorProto.INT8, "b": TensorProto.UINT8, "c": TensorProto.INT32}
    inputs = [helper.make_tensor_value_info(name, kind, [4000]) for name, kind in kinds.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_", TensorProto.FLOAT, [4000]) for name in kinds]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(np.float32(1), "s")])
    model = Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    (feed,) = random_feeds(model, dict.fromkeys(kinds, (4000,)), seed=1, count=1)
    assert (feed["a"].min(), feed["a"].max()) == (-128, 127)
    assert (feed["b"].min(), feed["b"].max()) == (0, 255)
    assert -(2**15) <= feed["c"].min() < -30000 < 30000 < feed["c"].max() < 2**15


def test_the_seed_determines_the_feeds_and_samples_differ(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    shapes = {"input": (2, 1, 16, 16)}
    feeds = random_feeds(model, shapes, seed=5, count=2)
    one, two = (feed["input"] for feed in feeds)
    assert one.dtype == np.float32
    assert one.shape == (2, 1, 16, 16)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(next(iter(feeds))["input"], one)
    assert not np.array_equal(next(iter(random_feeds(model, shapes, 6, 1)))["input"], one)
