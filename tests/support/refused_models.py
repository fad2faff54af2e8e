"""Small models that pass the static rules of lint, and that ONNX's checker or a runtime refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx_text import parsed

_CONVOLUTION = """q{i} = QuantizeLinear({x}, s, z)  d{i} = DequantizeLinear(q{i}, s, z)
  w{i} = DequantizeLinear<axis = 0>(wq, ws, wz)  c{i} = Conv(d{i}, w{i})
  p{i} = QuantizeLinear(c{i}, s, z)  o{i} = DequantizeLinear(p{i}, s, z) """
_CHANNELS = 32


def _saved(path: Path, text: str, opset: int, constants: dict[str, object], ir: int = 9) -> Path:
    proto = parsed(text, opset, ir=ir, **constants).proto
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    onnx.save(proto, path)
    return path


def _weight() -> dict[str, object]:
    random = np.random.default_rng(7)
    return {
        "wq": random.integers(-63, 64, size=(_CHANNELS, _CHANNELS, 3, 3)).astype(np.int8),
        "ws": np.full(_CHANNELS, 0.004, np.float32),
        "wz": np.zeros(_CHANNELS, np.int8),
    }


def pair_that_no_build_takes(path: Path, rows: str = "4") -> Path:
    """A pair of int8 before a Reshape and a MatMul in opset 21: ONNX Runtime 1.32 optimizes it to an invalid model."""
    text = f"""g (float[{rows},16,16] x) => (float[m,256] y) {{
      q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
      r = Reshape(d, shape)  y = MatMul(r, w) }}"""
    weight = np.random.default_rng(7).normal(size=(256, 256)).astype(np.float32)
    scale = {"s": np.float32(0.03), "z": np.int8(0)}
    return _saved(path, text, 21, {**scale, "shape": np.array([-1, 256]), "w": weight}, ir=10)


def pad_that_no_run_survives(path: Path) -> Path:
    """A Pad with ``axes`` between integer convolutions (onnxruntime#17760): ONNX Runtime 1.32 optimizes and loads it,
    and the run fails.
    """
    text = f"""g (float[1,{_CHANNELS},16,16] x) => (float[a,b,c,d] y) {{
      {_CONVOLUTION.format(i=0, x="x")} m = Pad(o0, pads, , axes) {_CONVOLUTION.format(i=1, x="m")} y = Relu(o1) }}"""
    numbers = {
        "s": np.float32(0.05),
        "z": np.uint8(128),
        "pads": np.ones(4, np.int64),
        "axes": np.array([2, 3]),
    }
    return _saved(path, text, 18, {**_weight(), **numbers})


def mixed_float_types(path: Path) -> Path:
    """A convolution of float16 data with float32 weights (Model-Optimizer#2314)."""
    text = f"""g (float16[1,{_CHANNELS},8,8] x) => (float16[a,b,c,d] y) {{
      q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
      w = DequantizeLinear<axis = 0>(wq, ws, wz)  y = Conv(d, w) }}"""
    return _saved(path, text, 19, {**_weight(), "s": np.float16(0.03), "z": np.int8(0)})


def integers_with_other_values(path: Path) -> Path:
    """A DequantizeLinear of int32, Reshape, MatMul (onnxruntime#25001): ONNX Runtime 1.32 optimizes it to a model that
    clips the values to 8 bits.
    """
    text = """g (int32[4,16,16] x) => (float[4,32] y) {
      d = DequantizeLinear(x, s)  r = Reshape(d, shape)  y = MatMul(r, w) }"""
    weight = np.random.default_rng(7).normal(size=(256, 32)).astype(np.float32)
    return _saved(path, text, 17, {"s": np.float32(0.03), "shape": np.array([4, 256]), "w": weight})
