"""The reference implementation runs pairs of every opset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.reference import reference_outputs


@pytest.mark.parametrize("opset", [10, 13, 17, 19, 21])
@pytest.mark.parametrize("channels", [False, True])
def test_pairs_are_what_another_runtime_makes_of_them(tmp_path: Path, opset: int, channels: bool) -> None:
    many = channels and opset > 10
    axis = "<axis = 1>" if many else ""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2,3,4] x) => (float[2,3,4] y, float[3] b) {{
      q = QuantizeLinear{axis}(x, s, z)  y = DequantizeLinear{axis}(q, s, z)  b = DequantizeLinear(ints, one) }}"""
    proto = onnx.parser.parse_model(text)
    scale = np.array([0.1, 0.02, 0.3], np.float32) if many else np.float32(0.05)
    for name, values in (
        ("s", scale),
        ("z", np.full(np.shape(scale), 7, np.uint8)),
        ("ints", np.array([-(2**31), 0, 2**31 - 1], np.int32)),
        ("one", np.float32(1e-6)),
    ):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    path = tmp_path / "pairs.onnx"
    onnx.save(proto, path)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)}
    expected = OnnxRuntime().build(path, BuildOptions()).run(feeds)
    found = reference_outputs(path, feeds)
    assert list(found) == ["y", "b"]
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
