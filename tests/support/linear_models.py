"""Models of one linear operator."""

from __future__ import annotations

import json

import numpy as np
from onnx_text import parsed

from qdqspec.accuracy.corrections.layers import LinearLayer, find_layers
from qdqspec.graph.model import Model
from qdqspec.types import Consumer, Site


def linear_model(op: str, weight: np.ndarray, rank: int, **attributes: object) -> Model:
    given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in attributes.items())
    shape = ", ".join("?" * rank)
    return parsed(f"g (float[{shape}] x) => (y) {{ [n] y = {op}{given and f'<{given}>'}(x, w) }}", w=weight)


def layer_of(model: Model) -> LinearLayer:
    site = Site(tensor="w", consumers=(Consumer("n", 1),), format="int8", weight=True)
    return find_layers(model, [site])["w"]
