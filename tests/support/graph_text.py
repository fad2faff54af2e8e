"""Models from graphs in text form, for small tests of placements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from qdqspec.graph.model import Model


def saved(path: Path, text: str, *, opset: int = 19, ir_version: int = 9, **weights: np.ndarray) -> Path:
    """The file of a model from a graph in ONNX's textual form.

    Operators of domain ``local`` are functions of the text, those of ``plugins`` are known to a plugin only.
    """
    domains = "".join(f', "{domain}": 1' for domain in ("local", "plugins") if f"{domain}." in text)
    proto = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": {opset}{domains}]>\n{text}'
    )
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(proto, path)
    return path


def kernels(count: int, *shape: int) -> dict[str, np.ndarray]:
    """Random weights ``w0``, ``w1``, ... of a shape."""
    random = np.random.default_rng(0)
    return {f"w{i}": random.normal(0, 0.2, shape).astype(np.float32) for i in range(count)}


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
