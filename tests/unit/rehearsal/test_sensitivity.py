"""The noise of single pairs, measured on the part of the graph that follows each pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_text import parsed
from random_models import ranges_for
from rehearsing import rehearsal_of, summed_db, summed_noise
from written_cases import normal

from qdqspec.accuracy.rehearsal import RehearsalRefusedError, find_sensitivities
from qdqspec.accuracy.switches import sites_of
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, Site

# The tensor before the ArgMax has no reader in the part of the graph after a cut.
TEXT = """deep (float[1,16] x) => (int64[1,1] first, float[1,16] y, float[1,16] z) {
  [one] a = MatMul(x, w)  b = Relu(a)  [early] j = MatMul(b, w)  first = ArgMax<axis = 1>(j)
  [two] c = MatMul(b, w)  d = Add(c, x)  e = Relu(d)  [three] f = MatMul(e, w)
  g = Add(f, b)  [four] y = MatMul(g, w)  [scale] h = Mul(y, half)  z = Sigmoid(h) }"""


def all_sites(model: Model) -> list[Site]:
    """Every float activation that a node reads, and the weights of products."""
    sites = []
    for tensor, ends in model.consumers.items():
        weight = tensor in model.constants
        if not weight or tensor == "w":
            axis = 1 if weight else None
            fmt = "int8" if weight else "uint8"
            sites.append(Site(tensor=tensor, consumers=ends, format=fmt, axis=axis, weight=weight))
    return sites


def alone(site: Site) -> Placement:
    return Placement(sites=frozenset({site}))


@pytest.mark.parametrize(("segments", "processes"), [(1, 1), (3, 3), (8, 1)])
def test_noise_measured_after_a_cut_equals_that_of_the_whole_model(segments: int, processes: int) -> None:
    model = parsed(TEXT, 19, w=normal(16, 16, deviation=0.3), half=np.full(16, 0.5, np.float32))
    numbers, feeds = Quantizer(model, ranges_for(model)), [{"x": normal(1, 16, seed=n)} for n in (1, 2)]
    with rehearsal_of(model, all_sites(model), numbers, *feeds, processes=processes) as rehearsal:
        found = find_sensitivities(rehearsal, segments=segments, first=4)
        expected = [rehearsal.error(alone(site)).guiding_db for site in rehearsal.switches]
        summed = [summed_db(found, alone(site)) for site in rehearsal.switches]
        assert summed == pytest.approx(expected, abs=0.05)
    assert found.guides == ("j", "y", "z")
    late = next(number for number, site in enumerate(found.switches) if site.tensor == "g")
    assert found.noise[late, 0] == 0
    assert found.noise[late, 1] > 0


def test_each_label_of_a_unit_has_the_noise_of_its_pairs(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    space = SchemeSpace(model, OnnxRuntime().capabilities())
    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    feed = {"input": np.random.default_rng(0).random((2, 1, 16, 16), np.float32)}
    with rehearsal_of(model, sites_of(space), numbers, feed) as rehearsal:
        found = find_sensitivities(rehearsal)
        labels = found.by_label(space)
        assert labels.keys() >= {(unit.id, unit.full) for unit in space.units}
        unit = space.units[0]
        alone = rehearsal.error(space.resolve({unit.id: unit.full})).guiding_db
    assert -10 * np.log10(labels[unit.id, unit.full]) == pytest.approx(alone, abs=3)
    everything = space.everything()
    together = summed_noise(found, space.resolve(everything))
    parts = {part for choice in everything.items() for part in labels.parts[choice]}
    assert labels.power_of(parts) == pytest.approx(together)  # tensors between units are there once, ...
    assert together < 0.9 * sum(labels[choice] for choice in everything.items())  # ... in the sum twice


def test_a_sensitivity_analysis_without_float_outputs_is_refused() -> None:
    model = parsed("g (float[4] x) => (int64[1] y) { y = Shape(x) }", 19)
    site = Site(tensor="x", consumers=(Consumer("Shape#0", 0),), format="uint8")
    numbers, feed = Quantizer(model, ranges_for(model)), {"x": np.zeros(4, np.float32)}
    with (
        rehearsal_of(model, [site], numbers, feed) as opened,
        pytest.raises(RehearsalRefusedError, match="floating-point"),
    ):
        find_sensitivities(opened)
