"""A small model that is faster in integers on the simulated device."""

from __future__ import annotations

import numpy as np
import onnx
from onnx_text import parsed

SHAPE = (1, 8, 12, 12)  # of its input "x" and its output "y"
_TEXT = """chain (float[1,8,12,12] x) => (float[1,8,12,12] y) {
    [conv0] a = Conv<pads = [1,1,1,1]>(x, w0)
    [relu0] b = Relu(a)
    [conv1] c = Conv<pads = [1,1,1,1]>(b, w1)
    [add] d = Add(b, c)
    [conv2] y = Conv<pads = [1,1,1,1]>(d, w2)
}"""


def chain_model(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions with activations and a residual, large enough to be faster in integers."""
    random = np.random.default_rng(seed)
    weights = {f"w{i}": random.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32) for i in range(3)}
    return parsed(_TEXT, 19, ir=9, **weights).proto
