"""Models from graphs in text form, for small tests of placements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx_text import parsed

from qdqspec.graph.model import Model


def saved(path: Path, text: str, *, opset: int = 19, ir_version: int = 9, **weights: np.ndarray) -> Path:
    """The file of a model from a graph in ONNX's textual form."""
    onnx.save(parsed(text, opset, ir=ir_version, **weights).proto, path)
    return path


def kernels(count: int, *shape: int) -> dict[str, np.ndarray]:
    """Random weights ``w0``, ``w1``, ... of a shape."""
    random = np.random.default_rng(0)
    return {f"w{i}": random.normal(0, 0.2, shape).astype(np.float32) for i in range(count)}


def model_of(text: str, **weights: tuple[int, ...]) -> Model:
    """A checked model from a graph in ONNX's textual form, ``(float[1, 8] x) => (float[1, 8] y) { ... }``.

    ``weights`` become initializers of these shapes. Every node is named after its first output.
    """
    model = parsed("g " + text, named=True, **weights)
    onnx.checker.check_model(model.proto, full_check=True)
    return model
