"""Labels that quantize half of a unit: its weights alone, or its activations alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import ranges_for

from qdqspec._core.codec import from_data, to_data
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import load_model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import HALVES, Placement, QuantizeRules


def test_the_sites_of_both_halves_are_those_of_the_full_label(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), FakeDevice().capabilities())
    for unit in (unit for unit in space.units if unit.op_type == "Conv"):
        weights, activations = (space.resolve({unit.id: half}) for half in unit.halves)
        assert weights.sites
        assert all(site.weight for site in weights.sites)
        assert activations.sites
        assert not any(site.weight for site in activations.sites)
        assert weights.sites | activations.sites == space.resolve({unit.id: "in+out"}).sites


def products(formats: str) -> SchemeSpace:
    """Two consecutive products, on a device where both can output floats."""
    text = "net (float[8,64] x) => (float[8,64] z) { [maker] y = MatMul(x, w0)  [reader] z = MatMul(y, w1) }"
    model = parsed(text, 19, w0=(64, 64), w1=(64, 64))
    return SchemeSpace(model, FakeDevice().capabilities(), rules=QuantizeRules(format=formats))


def test_a_weight_only_format_has_no_half_labels() -> None:
    space = products("int8+int4")
    assert all("int4:in-only" in unit.labels for unit in space.units)
    assert {half for unit in space.units for half in unit.halves} == set(HALVES)


def test_a_weight_only_unit_reads_float_activations() -> None:
    space = products("int8")
    both = space.resolve({"maker": "in+out", "reader": "weight-only"})
    assert both.sites == space.resolve({"maker": "in-only", "reader": "weight-only"}).sites
    assert {site.tensor for site in both.sites} == {"x", "w0", "w1"}


@pytest.mark.parametrize("half", HALVES)
def test_a_model_with_a_half_label_runs_with_a_small_error(models: Path, half: str) -> None:
    model = load_model(models / "digits_resnet.onnx")
    space = SchemeSpace(model, OnnxRuntime().capabilities())
    placement = space.resolve({unit.id: half for unit in space.units if half in unit.halves})
    assert from_data(Placement, to_data(placement)) == placement
    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    proto = insert_qdq(model, placement, numbers).proto
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"input": np.random.default_rng(0).uniform(0, 1, (1, 1, 16, 16)).astype(np.float32)}
    reference, halved = (outputs_of(each, feeds, "ENABLE_ALL")[0] for each in (model, proto))
    assert 0 < np.abs(halved - reference).max() < 0.5 * np.abs(reference).max()
