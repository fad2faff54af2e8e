"""The reference implementation runs Q/DQ pairs of every opset, with bounded memory."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
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
def test_outputs_of_pairs_equal_those_of_onnx_runtime(tmp_path: Path, opset: int, channels: bool) -> None:
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


CONVS = {
    "plain": ("1,4,9,9", "6,4,3,3", ""),
    "padded": ("2,4,9,9", "6,4,3,3", "pads = [0,1,2,1], strides = [2,1]"),
    "dilated": ("1,4,11,11", "6,4,3,3", "dilations = [2,3], pads = [2,2,2,2]"),
    "groups": ("2,6,8,8", "6,2,3,3", "group = 3, pads = [1,1,1,1]"),
    "depthwise": ("1,6,8,8", "6,1,5,5", "group = 6, strides = [2,2], pads = [2,2,2,2]"),
    "upper": ("1,4,8,8", "6,4,4,4", 'auto_pad = "SAME_UPPER", strides = [2,2]'),
    "lower": ("1,4,8,8", "6,4,4,4", 'auto_pad = "SAME_LOWER", strides = [3,3]'),
    "valid": ("1,4,8,8", "6,4,4,4", 'auto_pad = "VALID"'),
    "one axis": ("2,4,9", "6,4,3", "pads = [1,1]"),
    "three axes": ("1,2,5,5,5", "3,2,2,2,2", "strides = [1,2,1]"),
}


def conv_model(
    path: Path, shape: str, weight: str, attributes: str, nodes: str = ""
) -> dict[str, np.ndarray]:
    """A model with a convolution before other nodes, and an input for it."""
    given, sizes = ([int(size) for size in text.split(",")] for text in (shape, weight))
    dims = ",".join(f"d{axis}" for axis in range(len(given)))
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[{shape}] x) => (float[{dims}] y) {{
        {"c" if nodes else "y"} = Conv{f"<{attributes}>" if attributes else ""}(x, w, b) {nodes} }}"""
    )
    random = np.random.default_rng(0)
    for name, size in (("w", sizes), ("b", sizes[:1])):
        values = random.normal(size=size).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(proto, path)
    return {"x": random.normal(size=given).astype(np.float32)}


@pytest.mark.parametrize("name", CONVS)
def test_outputs_of_a_convolution_equal_those_of_onnx_runtime(tmp_path: Path, name: str) -> None:
    feeds = conv_model(tmp_path / "conv.onnx", *CONVS[name])
    expected = OnnxRuntime().build(tmp_path / "conv.onnx", BuildOptions()).run(feeds)
    found = reference_outputs(tmp_path / "conv.onnx", feeds)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-4, atol=1e-5)


def test_memory_is_bounded_by_the_largest_tensors(tmp_path: Path) -> None:
    """Tensors are released after their last reader, and a convolution needs a small multiple of its output."""
    names = ["c", *(f"r{number}" for number in range(30)), "y"]
    chain = " ".join(f"{after} = Relu({before})" for before, after in pairwise(names))
    feeds = conv_model(tmp_path / "deep.onnx", "1,16,128,128", "16,16,3,3", "pads = [1,1,1,1]", chain)
    tracemalloc.start()
    try:
        reference_outputs(tmp_path / "deep.onnx", feeds)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * feeds["x"].nbytes


def test_a_body_reads_tensors_of_the_outer_graph(tmp_path: Path) -> None:
    """A tensor that only a body reads is not an input of the node, but must not be released before the node has run."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x, bool c) => (float[2] y) {
        a = Relu(x)  b = Neg(a)
        d = If (c) <then_branch = t () => (float[2] p) { p = Add(a, b) },
                    else_branch = e () => (float[2] q) { q = Sub(a, b) }>
        f = Abs(d)  y = Neg(f) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "body.onnx")
    found = reference_outputs(tmp_path / "body.onnx", {"x": np.float32([1, -2]), "c": np.array(False)})
    assert found["y"].tolist() == [-2.0, 0.0]
