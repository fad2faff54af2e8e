"""The rule `copies-read-in-bodies`: with it no placement in a model with If or Loop crashes the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_text import model_of

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import Model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.search_space import SchemeSpace

COPIES = {
    "MaxPool": "MaxPool <kernel_shape: ints = [1, 1]> (r)",
    "Transpose": "Transpose <perm: ints = [0, 1, 3, 2]> (r)",
    "Reshape": "Reshape (r, shape)",
    "two copies": "Transpose <perm: ints = [0, 1, 3, 2]> (s)",
}
READERS = {  # an If whose condition is constant would be inlined
    "Loop": """
        y = Loop (n, "", x) <body: graph = b (int64 i, bool k, float[1,4,6,6] v) => (bool k2, float[1,4,6,6] w)
            { k2 = Identity(k)  w = Add(v, p) }>""",
    "If": """
        y = If (c) <then_branch: graph = t () => (float[1,4,6,6] a) { a = Relu(p) },
            else_branch: graph = e () => (float[1,4,6,6] o) { o = Neg(p) }>""",
    "neither": "y = Add(p, x)",
}


def drawn(copy: str, reader: str) -> Model:
    """A convolution, a copy of its result, and a reader of the copy in a body or in the main graph."""
    second = "s = Reshape (r, shape)" if "(s)" in COPIES[copy] else ""
    text = f"""(float[1,4,6,6] x, bool c) => (float[1,4,6,6] y)
        <int64[4] shape = {{1, 4, 6, 6}}, int64 n = {{1}}> {{
            h = Conv (x, W)  r = Relu (h)  {second}  p = {COPIES[copy]}  {READERS[reader]} }}"""
    return Model(onnx.shape_inference.infer_shapes(model_of(text, W=(4, 4, 1, 1)).proto))


@pytest.fixture(scope="module")
def backend() -> Iterator[Isolated]:
    with Isolated("onnxruntime") as opened:
        yield opened


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("copy", COPIES)
def test_every_label_builds(backend: Isolated, tmp_path: Path, copy: str, reader: str) -> None:
    model = drawn(copy, reader)
    space = SchemeSpace(model, backend.capabilities())
    labels = space.everything()
    assert labels or reader != "neither"  # a convolution has only labels with a quantized result
    ranges = {name: TensorRange(-3.0, 3.0) for name in ("x", "h", "r", "s", "p", "y")}
    for chosen in (labels, *({unit.id: label} for unit in space.units for label in unit.labels)):
        made = Inserter(model, Quantizer(model, ranges)).insert(space.resolve(chosen))
        save_model(made.proto, tmp_path / "q.onnx")
        engine = backend.build(tmp_path / "q.onnx", BuildOptions())
        engine.run({"x": np.ones((1, 4, 6, 6), np.float32), "c": np.array(True)})
        engine.close()


@pytest.mark.parametrize(("reader", "units"), [("If", set()), ("neither", {"h"})])
def test_the_rule_applies_to_bodies_only(reader: str, units: set[str]) -> None:
    capabilities = FakeDevice().capabilities()
    model = drawn("Reshape", reader)
    without, with_rule = (
        {unit.id for unit in SchemeSpace(model, replace(capabilities, rules=rules)).units}
        for rules in ({}, OnnxRuntime().capabilities().rules)
    )
    assert "h" in without
    assert with_rule & {"h"} == units
