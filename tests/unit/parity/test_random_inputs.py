from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from qdqspec.accuracy.data import random_feeds
from qdqspec.graph.model import Model, load_model

VOCABULARY = 37


def test_random_indices_cover_exactly_the_rows_of_their_table() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (int32[1,400] ids, int64[1,400,1] mask) => (float[1,400,4] y) {
          wide = Cast<to = 7>(ids)  rows = Gather(table, wide)
          weights = Cast<to = 1>(mask)  y = Mul(rows, weights) }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((VOCABULARY, 4), np.float32), "table"))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    shapes = {"ids": (1, 400), "mask": (1, 400, 1)}
    feeds = list(random_feeds(Model(proto), shapes, seed=1, count=5))
    for feed in feeds:
        session.run(None, feed)  # raises where an index is out of range
    ids = np.concatenate([feed["ids"] for feed in feeds])
    assert ids.dtype == np.int32
    assert set(np.unique(ids)) == set(range(VOCABULARY))
    assert set(np.unique(feeds[0]["mask"])) == {0, 1}


def test_random_integers_that_are_dequantized_span_their_type() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (int8[4000] a, uint8[4000] b, int32[4000] c) => (float[4000] x, float[4000] y, float[4000] z)
        <float s = {1}> {
          x = DequantizeLinear(a, s)  y = DequantizeLinear(b, s)  z = DequantizeLinear(c, s) }""")
    (feed,) = random_feeds(Model(proto), dict.fromkeys("abc", (4000,)), seed=1, count=1)
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
