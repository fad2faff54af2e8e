"""Small models with pairs, written as ONNX text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trt_corpus import parse

from qdqspec.graph.model import Model


@pytest.fixture
def parsed() -> Callable[..., Model]:
    """``parsed("float[1,16,8,8] x", "y", "y = Relu(x)")``: a model with these inputs, outputs and nodes."""
    return parse
