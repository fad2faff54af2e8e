"""One session with a switch for every pair, the tensors that guide a search, and the noise of single pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import ranges_for
from rehearsing import built_outputs, rehearsal_of, summed_db, summed_noise
from written_cases import normal

from qdqspec.accuracy.rehearsal import RehearsalRefusedError, find_sensitivities, guiding_outputs, label_noise
from qdqspec.backends.onnxruntime import ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Corrections, Quantizer, weight_key
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.switches import sites_of
from qdqspec.types import Consumer, Placement, Site

TEXT = """chain (float[1,8,6,6] x) => (float[1,8,6,6] y, int64[1,1,6,6] best) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)  [relu] b = Relu(a)  [second] c = Conv<pads = [1, 1, 1, 1]>(b, w)
  [add] d = Add(b, c)  [sig] y = Sigmoid(d)
  [choose] best = ArgMax<axis = 1>(d) }"""
FEEDS = [{"x": normal(1, 8, 6, 6, seed=number)} for number in (1, 2, 3)]


@pytest.fixture
def model() -> Model:
    return parsed(TEXT, 19, w=normal(8, 8, 3, 3, deviation=0.2))


def site(tensor: str, *ends: tuple[str, int], fmt: str = "uint8", weight: bool = False) -> Site:
    readers = tuple(Consumer(*end) for end in ends)
    return Site(tensor=tensor, consumers=readers, format=fmt, axis=0 if weight else None, weight=weight)


SITES = (
    site("x", ("first", 0)),
    site("b", ("second", 0), ("add", 0)),
    site("w", ("first", 1), ("second", 1), fmt="int8", weight=True),
    site("d", ("sig", 0)),
)


def placed(*sites: Site) -> Placement:
    return Placement(sites=frozenset(sites))


def test_the_error_is_over_all_samples_at_the_outputs_and_before_a_selection(
    model: Model, tmp_path: Path
) -> None:
    numbers, placement = Quantizer(model, ranges_for(model)), placed(*SITES[:2], SITES[3])
    with rehearsal_of(model, SITES, numbers, *FEEDS) as rehearsal:
        found, nothing = rehearsal.error(placement), rehearsal.error(placed())
        assert rehearsal.error(placed(SITES[3])).guiding_db < 100
    assert (nothing.sqnr_db, nothing.guiding_db, nothing.max_abs) == (np.inf, np.inf, 0.0)
    reference, tuned = (
        [built_outputs(model, each, numbers, feed, tmp_path)["y"] for feed in FEEDS]
        for each in (placed(), placement)
    )
    noise = np.square(np.subtract(reference, tuned)).sum()
    assert found.outputs[0].sqnr_db == pytest.approx(
        10 * np.log10(np.square(reference).sum() / noise), abs=0.01
    )
    assert found.outputs[0].max_abs == pytest.approx(np.abs(np.subtract(reference, tuned)).max())
    assert [one.name for one in found.outputs] == ["y", "best"]
    assert [one.name for one in found.guiding] == ["y", "d"]
    assert found.samples == 3


def test_a_pair_without_a_switch_is_an_error_with_its_name(model: Model) -> None:
    why = "no uint8 pair on tensor 'b' before input 0 of node 'add'"
    numbers = Quantizer(model, ranges_for(model))
    with (
        rehearsal_of(model, SITES[:1], numbers, *FEEDS) as rehearsal,
        pytest.raises(PlacementError, match=why),
    ):
        rehearsal.error(placed(site("b", ("add", 0))))


def test_a_rehearsal_of_unknown_operators_is_refused(model: Model) -> None:
    model.proto.opset_import.add(domain="elsewhere", version=1)
    model.proto.graph.node[-1].domain = "elsewhere"
    foreign = Model(model.proto)
    with pytest.raises(RehearsalRefusedError, match=r"cannot be rehearsed.*elsewhere"):
        rehearsal_of(foreign, SITES[:1], Quantizer(foreign, ranges_for(foreign)), *FEEDS)


def test_an_operator_that_raising_the_opset_replaces_keeps_its_switch(tmp_path: Path) -> None:
    old = parsed(
        "old (float[1,8,6,6] x) => (float[1,8,6,6] y) { [soft] a = Softmax(x)  y = Relu(a) }", opset=11
    )
    numbers, placement = Quantizer(old, ranges_for(old)), placed(site("x", ("soft", 0), fmt="int16"))
    with rehearsal_of(old, placement.sites, numbers, *FEEDS) as rehearsal:
        expected = built_outputs(old, placement, numbers, FEEDS[0], tmp_path)["y"]
        np.testing.assert_array_equal(rehearsal.engine(placement).run(FEEDS[0])["y"], expected)
        assert 0 < np.abs(expected - rehearsal.engine(placed()).run(FEEDS[0])["y"]).max() < 0.1


ONE, INDEX = "float[1,8] y", "int64[1,1] y"
# What follows `a`, the product of input and weight; the outputs; the guides.
CASES = {
    "computed floats": ("y = Softmax(a)", ONE, ["y"]),
    "copied floats": ("b = Sigmoid(a)  y = Identity(b)", ONE, ["y"]),
    "an argmax": ("b = Softmax(a)  c = Transpose(b)  y = ArgMax<axis = 1>(c)", INDEX, ["b"]),
    "elements": ("s = Sigmoid(a)  i = ArgMax<axis = 1>(s)  y = Gather<axis = 1>(a, i)", ONE, ["a", "s"]),
    "several outputs": ("z = Relu(a)  y = ArgMax<axis = 1>(a)", f"float[1,8] z, {INDEX}", ["z", "a"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_output_is_guided_by_the_last_floats_before_a_selection(name: str) -> None:
    body, outputs, guides = CASES[name]
    ports = f"(float[1,8] x, float[8,8] w) => ({outputs})"
    found = guiding_outputs(parsed(f"g {ports} {{ a = MatMul(x, w)  {body} }}", 19))
    assert sorted(tensor for edges in found.values() for tensor, _ in edges) == sorted(guides)
    assert found.keys() == {port.split()[1] for port in outputs.split(", ")}


# The tensor before the ArgMax has no reader in the part of the graph after a cut.
DEEP = """deep (float[1,16] x) => (int64[1,1] first, float[1,16] y, float[1,16] z) {
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


@pytest.mark.parametrize(("segments", "processes"), [(1, 1), (3, 3), (8, 1)])
def test_noise_measured_after_a_cut_equals_that_of_the_whole_model(segments: int, processes: int) -> None:
    model = parsed(DEEP, 19, w=normal(16, 16, deviation=0.3), half=np.full(16, 0.5, np.float32))
    numbers, feeds = Quantizer(model, ranges_for(model)), [{"x": normal(1, 16, seed=n)} for n in (1, 2)]
    with rehearsal_of(model, all_sites(model), numbers, *feeds, processes=processes) as rehearsal:
        found = find_sensitivities(rehearsal, segments=segments, first=4)
        expected = [rehearsal.error(placed(site)).guiding_db for site in rehearsal.switches]
        summed = [summed_db(rehearsal, found, placed(site)) for site in rehearsal.switches]
        assert summed == pytest.approx(expected, abs=0.05)
        late = next(number for number, site in enumerate(rehearsal.switches) if site.tensor == "g")
    assert found.shape[1] == 3
    assert found[late, 0] == 0
    assert found[late, 1] > 0


def test_each_label_of_a_unit_has_the_noise_of_its_pairs(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    space = SchemeSpace(model, OnnxRuntime().capabilities())
    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    feed = {"input": np.random.default_rng(0).random((2, 1, 16, 16), np.float32)}
    with rehearsal_of(model, sites_of(space), numbers, feed) as rehearsal:
        found = find_sensitivities(rehearsal)
        labels = label_noise(rehearsal, found, space)
        assert labels.keys() >= {(unit.id, unit.full) for unit in space.units}
        unit = space.units[0]
        alone = rehearsal.error(space.resolve({unit.id: unit.full})).guiding_db
    assert -10 * np.log10(labels[unit.id, unit.full]) == pytest.approx(alone, abs=3)
    everything = space.everything()
    together = summed_noise(rehearsal, found, space.resolve(everything))
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


# ---- biases that the backend rounds to steps of input scale times weight scale -------------------


ROUNDED = ops.capabilities(()).rounds_biases
FEED = {"x": np.random.default_rng(1).normal(size=(1, 8, 24, 24)).astype(np.float32)}


@pytest.fixture
def biased() -> Model:
    """Two convolutions that read one bias."""
    text = """chain (float[1,8,24,24] x) => (float[1,8,24,24] y) {
        [first] a = Conv<pads = [1, 1, 1, 1]>(x, v, b)  [relu] r = Relu(a)
        [second] c = Conv<pads = [1, 1, 1, 1]>(r, w, b)  [last] y = Tanh(c) }"""
    shapes = {"v": (8, 8, 3, 3), "w": (8, 8, 3, 3), "b": (8,)}
    weights = {name: normal(*shape, deviation=0.2, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return Model(onnx.shape_inference.infer_shapes(parsed(text, 19, **weights).proto))


def numbers_of(biased: Model, space: SchemeSpace, shift: float = 0) -> Quantizer:
    biases = {}
    if shift:
        weights = [site for site in sites_of(space) if site.tensor == "v"]
        biases = {weight_key(site): np.full(8, shift, np.float32) for site in weights}
    spans = {"x": (-30.0, 30.0), "r": (0.0, 20.0), "c": (-2.0, 2.0), "y": (-1.0, 1.0)}
    ranges = {name: TensorRange(low, high) for name, (low, high) in spans.items()}
    return Quantizer(biased, ranges, corrections=Corrections(biases=biases))


def built(biased: Model, placement: Placement, numbers: Quantizer) -> np.ndarray:
    """The output once ONNX Runtime has quantized constants, before it replaces operators by integer ones."""
    return outputs_of(insert_qdq(biased, placement, numbers).proto, FEED, "ENABLE_BASIC")[0]


@pytest.mark.parametrize("labels", [{"first": "in+out"}, dict.fromkeys(("first", "second"), "in+out")])
@pytest.mark.parametrize("shift", [0, 0.07])
def test_rounded_biases_are_those_of_runs(biased: Model, labels: dict, shift: float) -> None:
    space = SchemeSpace(biased, ops.capabilities(()))
    numbers, placement = numbers_of(biased, space, shift=shift), space.resolve(labels)
    expected = built(biased, placement, numbers)
    with rehearsal_of(biased, sites_of(space), numbers, FEED, rounds_biases=ROUNDED) as rehearsal:
        np.testing.assert_allclose(rehearsal.engine(placement).run(FEED)["y"], expected, atol=1e-5)
        nothing = Placement(sites=frozenset())
        plain = built(biased, nothing, numbers)
        np.testing.assert_allclose(rehearsal.engine(nothing).run(FEED)["y"], plain, atol=1e-5)
    with rehearsal_of(biased, sites_of(space), numbers, FEED) as rehearsal:
        assert np.abs(rehearsal.engine(placement).run(FEED)["y"] - expected).max() > 1e-3
