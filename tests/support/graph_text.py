"""Models from graphs in text form, for small tests of placements."""

from __future__ import annotations

import numpy as np
import onnx.parser
from onnx import numpy_helper

from qdqspec.graph.model import Model


def model_of(text: str, **weights: tuple[int, ...]) -> Model:
    """A checked model from a graph in ONNX's textual form, ``(float[1, 8] x) => (float[1, 8] y) { ... }``.

    ``weights`` become initializers of these shapes. Every node is named after its first output.
    """
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g ' + text)
    random = np.random.default_rng(0)
    for name, shape in weights.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    for node in proto.graph.node:
        node.name = node.output[0]
    onnx.checker.check_model(proto, full_check=True)
    return Model(proto)
