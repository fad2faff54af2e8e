"""Biases that the backend rounds to steps of input scale times weight scale are rounded in the rehearsal too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from rehearsing import rehearsal_of
from written_cases import normal

from qdqspec.accuracy.switches import sites_of
from qdqspec.backends.onnxruntime import ops
from qdqspec.graph.model import Model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Corrections, Quantizer, weight_key
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Placement

ROUNDED = ops.capabilities(()).rounds_biases
FEED = {"x": np.random.default_rng(1).normal(size=(1, 8, 24, 24)).astype(np.float32)}


@pytest.fixture
def model() -> Model:
    """Two convolutions that read one bias."""
    text = """chain (float[1,8,24,24] x) => (float[1,8,24,24] y) {
        [first] a = Conv<pads = [1, 1, 1, 1]>(x, v, b)  [relu] r = Relu(a)
        [second] c = Conv<pads = [1, 1, 1, 1]>(r, w, b)  [last] y = Tanh(c) }"""
    shapes = {"v": (8, 8, 3, 3), "w": (8, 8, 3, 3), "b": (8,)}
    weights = {name: normal(*shape, deviation=0.2, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return Model(onnx.shape_inference.infer_shapes(parsed(text, 19, **weights).proto))


def numbers_of(model: Model, space: SchemeSpace, shift: float = 0) -> Quantizer:
    biases = {}
    if shift:
        weights = [site for site in sites_of(space) if site.tensor == "v"]
        biases = {weight_key(site): np.full(8, shift, np.float32) for site in weights}
    spans = {"x": (-30.0, 30.0), "r": (0.0, 20.0), "c": (-2.0, 2.0), "y": (-1.0, 1.0)}
    ranges = {name: TensorRange(low, high) for name, (low, high) in spans.items()}
    return Quantizer(model, ranges, corrections=Corrections(biases=biases))


def built(model: Model, placement: Placement, numbers: Quantizer) -> np.ndarray:
    """The output once ONNX Runtime has quantized constants, before it replaces operators by integer ones."""
    return outputs_of(insert_qdq(model, placement, numbers).proto, FEED, "ENABLE_BASIC")[0]


@pytest.mark.parametrize("labels", [{"first": "in+out"}, dict.fromkeys(("first", "second"), "in+out")])
@pytest.mark.parametrize("shift", [0, 0.07])
def test_rounded_biases_are_those_of_runs(model: Model, labels: dict, shift: float) -> None:
    space = SchemeSpace(model, ops.capabilities(()))
    numbers, placement = numbers_of(model, space, shift=shift), space.resolve(labels)
    expected = built(model, placement, numbers)
    with rehearsal_of(model, sites_of(space), numbers, FEED, rounds_biases=ROUNDED) as rehearsal:
        np.testing.assert_allclose(rehearsal.engine(placement).run(FEED)["y"], expected, atol=1e-5)
        nothing = Placement(sites=frozenset())
        plain = built(model, nothing, numbers)
        np.testing.assert_allclose(rehearsal.engine(nothing).run(FEED)["y"], plain, atol=1e-5)
    with rehearsal_of(model, sites_of(space), numbers, FEED) as rehearsal:
        assert np.abs(rehearsal.engine(placement).run(FEED)["y"] - expected).max() > 1e-3
